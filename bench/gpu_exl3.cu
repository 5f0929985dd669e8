// How long do the EXL3 kernels take on this GPU, and how far are they from reading their bytes once?
//
// Method (that of the recorded exllamav3 figures): N calls on N different weight buffers, in all several times the L2, recorded back to
// back in one CUDA graph; time of one replay between two events, divided by N; median of 15 replays after 2. So weights come from
// device memory, host launches are left out, gaps on the device are kept. Trellis bits are random (every pattern is valid),
// activations Gaussian. GB/s counts packed trellis bytes; % is of the copy bandwidth measured in the same run. Error: against
// float64 products with the weights that decode_weight gives. Routing and its plan are not timed, as they were not for the peer.
// Usage: bench_gpu_exl3 [--quick]
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/rng.h"
#include "base/thread_pool.h"
#include "codec/cuda/experts.h"
#include "codec/cuda/matrix.h"
#include "codec/cuda/product.h"
#include "codec/cuda/windows.h"
#include "device/device.h"
#include "device/graph.h"
#include "device/stream.h"
#include "tensor/float_formats.h"

namespace {

using namespace espalier;
using namespace espalier::codec;
using namespace espalier::codec::cuda;
using device::DeviceArray;
using device::Stream;

template <typename T>
T taken(Result<T> result) {
  CHECK(result.ok()) << result.error().message();
  return std::move(result).value();
}
void must(const Status& status) { CHECK(status.ok()) << status.message(); }

__device__ uint64_t mixed(uint64_t z) {  // splitmix64
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}
__global__ void fill_random_kernel(uint4* to, size_t n, uint64_t seed) {
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += size_t{gridDim.x} * blockDim.x) {
    const uint64_t a = mixed(seed + 2 * i * 0x9E3779B97F4A7C15ull), b = mixed(seed + (2 * i + 1) * 0x9E3779B97F4A7C15ull);
    to[i] = {static_cast<uint32_t>(a), static_cast<uint32_t>(a >> 32), static_cast<uint32_t>(b), static_cast<uint32_t>(b >> 32)};
  }
}
__global__ void empty_kernel() {}

// Reads a matrix's bytes once, 16 at a time, and nothing else: the floor.
__global__ __launch_bounds__(256) void read_kernel(const uint4* from, size_t n, uint32_t* sink) {
  uint4 acc = {0, 0, 0, 0};
  const size_t stride = size_t{gridDim.x} * 256;
  for (size_t i = size_t{blockIdx.x} * 256 + threadIdx.x; i < n; i += 4 * stride) {
    uint4 v[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) v[u] = i + u * stride < n ? __ldcs(from + i + u * stride) : uint4{0, 0, 0, 0};
#pragma unroll
    for (int u = 0; u < 4; ++u) acc.x ^= v[u].x, acc.y ^= v[u].y, acc.z ^= v[u].z, acc.w ^= v[u].w;
  }
  if ((acc.x ^ acc.y ^ acc.z ^ acc.w) == 0x12345678u) sink[threadIdx.x] = acc.x;
}

struct Bench {
  device::DeviceInfo info = taken(device::find_device(0));
  Stream stream = taken(Stream::create(0));
  ThreadPool pool;
  double copy_gb_s = 0;

  // Median microseconds of one call; calls(i) queues the i-th.
  template <typename Calls>
  double microseconds(int n, Calls calls) {
    must(calls(0));  // module load and the like
    must(stream.synchronize());
    const device::Graph graph = taken(device::Graph::capture(stream, [&]() -> Status {
      for (int i = 0; i < n; ++i) RETURN_IF_ERROR(calls(i));
      return ok_status();
    }));
    device::Event start = taken(device::Event::create()), stop = taken(device::Event::create());
    std::vector<double> times;
    for (int replay = -2; replay < 15; ++replay) {
      must(start.record(stream));
      must(graph.launch(stream));
      must(stop.record(stream));
      const double ms = taken(stop.milliseconds_since(start));
      if (replay >= 0) times.push_back(1e3 * ms / n);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

  double weights_per_cycle(double weights, double us) const {
    return weights / (us * 1e-3 * info.clock_khz * info.n_multiprocessors);
  }
};

DeviceArray<uint32_t> random_words(Bench& b, size_t n_words, uint64_t seed) {
  DeviceArray<uint32_t> out = taken(DeviceArray<uint32_t>::allocate(0, n_words, "random trellis"));
  fill_random_kernel<<<4096, 256, 0, b.stream.handle()>>>(reinterpret_cast<uint4*>(out.data()), n_words / 4, seed);
  must(b.stream.launched("fill_random_kernel"));
  return out;
}

DeviceArray<uint16_t> scales(Bench& b, int64_t n, double size, const std::string& name) {
  const CounterRng rng(1, name);
  std::vector<uint16_t> v;
  for (int64_t i = 0; i < n; ++i) v.push_back(encode_f16(rng.sign(2 * i) * static_cast<float>(size * (0.7 + 0.6 * rng.uniform(2 * i + 1)))));
  return taken(DeviceArray<uint16_t>::upload(b.stream, v, "scales"));
}

std::vector<float> gaussian(int64_t n, const std::string& name) {
  const CounterRng rng(2, name);
  std::vector<float> v(static_cast<size_t>(n));
  for (size_t i = 0; i < v.size(); ++i) {
    v[i] = static_cast<float>(std::sqrt(-2 * std::log(1 - rng.uniform(2 * i))) * std::cos(6.283185307179586 * rng.uniform(2 * i + 1)));
  }
  return v;
}

std::vector<double> product_f64(Bench& b, const DeviceMatrix& m, const std::vector<double>& x) {
  const DeviceArray<float> w = taken(DeviceArray<float>::allocate(0, static_cast<size_t>(m.k * m.n), "weight"));
  must(decode_weight(b.stream, m, WeightType::kF32, w.data()));
  const std::vector<float> host = taken(w.download(b.stream));
  const int64_t rows = static_cast<int64_t>(x.size()) / m.k;
  std::vector<double> y(static_cast<size_t>(rows * m.n));
  b.pool.parallel_for(m.n, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = 0; i < m.k; ++i) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t o = begin; o < end; ++o) y[r * m.n + o] += x[r * m.k + i] * host[static_cast<size_t>(i * m.n + o)];
      }
    }
  });
  return y;
}

double relative_error(const std::vector<float>& got, const std::vector<double>& expected) {
  double error = 0, power = 0;
  for (size_t i = 0; i < got.size(); ++i) error += (got[i] - expected[i]) * (got[i] - expected[i]), power += expected[i] * expected[i];
  return std::sqrt(error / power);
}

// ---- recorded figures -----------------------------------------------------------------------------------------------

// exllamav3 v1.4.1 on an H200, its default path: golden/baselines.md (b), us for 1, 2, 4, 6, 8, 16 rows.
struct PeerProduct {
  int k, n, width;
  double us[6];
};
constexpr int kRows[6] = {1, 2, 4, 6, 8, 16};
constexpr PeerProduct kPeerProducts[] = {
    {5120, 2304, 2, {13.2, 16.4, 16.6, 16.6, 16.7, 24.0}}, {5120, 2304, 3, {14.5, 14.1, 18.5, 18.6, 18.7, 23.3}},
    {5120, 2304, 4, {16.1, 13.7, 17.2, 17.2, 17.3, 24.1}}, {5120, 2304, 5, {12.8, 15.3, 23.0, 23.2, 23.2, 24.6}},
    {2304, 5120, 2, {11.8, 15.7, 13.1, 13.2, 13.5, 19.4}}, {2304, 5120, 3, {11.7, 12.8, 13.9, 14.0, 14.3, 19.6}},
    {2304, 5120, 4, {13.1, 12.6, 13.3, 13.3, 13.6, 19.5}}, {2304, 5120, 5, {11.3, 14.3, 19.2, 19.2, 19.3, 20.2}}};
// The same, (c), best path, us for 1, 2, 4, 6 tokens.
struct PeerExperts {
  int width;
  double us[4];
};
constexpr int kTokens[4] = {1, 2, 4, 6};
constexpr PeerExperts kPeerExperts[] = {{2, {132, 247, 475, 763}}, {3, {138, 260, 497, 799}}, {4, {131, 243, 471, 754}}, {5, {151, 286, 551, 885}}};

// ---- what is timed --------------------------------------------------------------------------------------------------

void bench_machine(Bench& b) {
  const size_t size = size_t{2} << 30;
  const auto from = taken(device::DeviceBuffer::allocate(0, size, "copy")), to = taken(device::DeviceBuffer::allocate(0, size, "copy"));
  fill_random_kernel<<<4096, 256, 0, b.stream.handle()>>>(static_cast<uint4*>(from.data()), size / 16, 5);
  must(b.stream.launched("fill_random_kernel"));
  device::Event start = taken(device::Event::create()), stop = taken(device::Event::create());
  std::vector<double> times;
  for (int i = -2; i < 15; ++i) {  // not in a graph, where a copy engine would do it
    must(start.record(b.stream));
    must(b.stream.copy_on_device(to.data(), from.data(), size));
    must(stop.record(b.stream));
    const double ms = taken(stop.milliseconds_since(start));
    if (i >= 0) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  b.copy_gb_s = 2e-6 * static_cast<double>(size) / times[times.size() / 2];
  const double empty_us = b.microseconds(64, [&](int) {
    empty_kernel<<<132, 256, 0, b.stream.handle()>>>();
    return b.stream.launched("empty_kernel");
  });
  std::printf("copy of 2 GiB: %.0f GB/s read and written; empty kernel in a graph: %.2f us\n", b.copy_gb_s, empty_us);
}

void bench_products(Bench& b, bool quick) {
  ProductScratch scratch = taken(ProductScratch::create(b.stream, 5120, 5120));
  std::printf("\none matrix, mul1: us a call (GB/s, %% of copy, weights per SM-cycle; exllamav3 v1.4.1 default / this), error of the output\n");
  for (const PeerProduct& peer : kPeerProducts) {
    if (quick && peer.width != 3) continue;
    const int k2 = 2 * peer.width;
    const size_t words = static_cast<size_t>(layout_words(peer.k, peer.n, k2));
    const int n = static_cast<int>(std::max<size_t>(64, (size_t{300} << 20) / (4 * words)));
    const DeviceArray<uint32_t> blocks = random_words(b, words * static_cast<size_t>(n), 7);
    const auto suh = scales(b, peer.k, 1 / std::sqrt(double(peer.k)), "suh"), svh = scales(b, peer.n, 1, "svh");
    const auto matrix = [&](int i) {
      return DeviceMatrix{blocks.data() + words * static_cast<size_t>(i), suh.data(), svh.data(), peer.k, peer.n, k2, Codebook::kMul1};
    };
    const std::vector<float> x = gaussian(16 * peer.k, "x");
    const auto in = taken(DeviceArray<float>::upload(b.stream, x, "x"));
    const auto out = taken(DeviceArray<float>::allocate(0, static_cast<size_t>(16 * peer.n), "y"));
    uint32_t* sink = reinterpret_cast<uint32_t*>(out.data());
    double floor_us = 1e9;
    for (int grid : {132, 264, 528}) {
      floor_us = std::min(floor_us, b.microseconds(n, [&](int i) {
        read_kernel<<<grid, 256, 0, b.stream.handle()>>>(reinterpret_cast<const uint4*>(matrix(i).blocks), words / 4, sink);
        return b.stream.launched("read_kernel");
      }));
    }
    std::printf("%d x %d K=%d (floor: reading alone %.2f us)\n", peer.k, peer.n, peer.width, floor_us);
    must(multiply(b.stream, matrix(0), in.data(), 16, out.data(), scratch));
    const double error = relative_error(taken(out.download(b.stream)), product_f64(b, matrix(0), std::vector<double>(x.begin(), x.end())));
    for (int r = 0; r < 6; ++r) {
      const double gb = 4e-3 * static_cast<double>(words);
      double us[2];
      for (int plan = 0; plan < 2; ++plan) {
        us[plan] = b.microseconds(n, [&](int i) {
          return multiply(b.stream, matrix(i), in.data(), kRows[r], out.data(), scratch, plan == 0 ? ProductPlan::kOneLaunch : ProductPlan::kTwoLaunches);
        });
      }
      const double best = std::min(us[0], us[1]);
      std::printf("  %2d rows: %6.2f us in one launch, %6.2f in two  (%.0f GB/s, %.1f %%, %.1f w/SM-cycle; peer %.1f us, ratio %.2f)  error %.1e\n",
                  kRows[r], us[0], us[1], gb / best, 100 * gb / best / b.copy_gb_s, b.weights_per_cycle(double(peer.k) * peer.n * kRows[r], best),
                  peer.us[r], peer.us[r] / best, error);
    }
  }
}

struct Layer {
  std::vector<ExpertMatrices> experts;
  DeviceArray<uint32_t> blocks;
  double mean_width = 0;
};

constexpr int kModel = 5120, kFf = 2304, kActive = 6;

// n experts; widths[i % size] for the i-th matrix in a random order.
Layer make_layer(Bench& b, int n, const std::vector<int>& k2s, const uint16_t* suh, const uint16_t* svh) {
  Layer layer;
  const CounterRng rng(3, "layer");
  std::vector<int> of;
  size_t words = 0;
  for (int i = 0; i < 3 * n; ++i) {
    of.push_back(k2s[rng.bits(static_cast<uint64_t>(i)) % k2s.size()]);
    words += static_cast<size_t>(layout_words(kModel, kFf, of.back()));
    layer.mean_width += of.back() / 2.0 / (3 * n);
  }
  layer.blocks = random_words(b, words, 9);
  const uint32_t* at = layer.blocks.data();
  const auto next = [&](int i, int64_t k, int64_t columns) {
    const DeviceMatrix m{at, suh, svh, k, columns, of[static_cast<size_t>(i)], Codebook::kMul1};
    at += layout_words(k, columns, m.k2);
    return m;
  };
  for (int e = 0; e < n; ++e) {
    ExpertMatrices m;
    m.gate = next(3 * e, kModel, kFf);
    m.up = next(3 * e + 1, kModel, kFf);
    m.down = next(3 * e + 2, kFf, kModel);
    layer.experts.push_back(m);
  }
  return layer;
}

double experts_error(Bench& b, const Layer& layer, const std::vector<int32_t>& ids, const std::vector<float>& x, const std::vector<float>& got) {
  std::vector<double> y(kModel);
  for (int a = 0; a < kActive; ++a) {
    const ExpertMatrices& m = layer.experts[static_cast<size_t>(ids[static_cast<size_t>(a)])];
    const std::vector<double> row(x.begin(), x.begin() + kModel);
    const std::vector<double> g = product_f64(b, m.gate, row), u = product_f64(b, m.up, row);
    std::vector<double> h(g.size());
    for (size_t i = 0; i < h.size(); ++i) h[i] = std::min(g[i], 7.0) / (1 + std::exp(-std::min(g[i], 7.0))) * std::clamp(u[i], -7.0, 7.0);
    const std::vector<double> out = product_f64(b, m.down, h);
    for (int i = 0; i < kModel; ++i) y[static_cast<size_t>(i)] += out[static_cast<size_t>(i)] / kActive;
  }
  return relative_error(std::vector<float>(got.begin(), got.begin() + kModel), y);
}

void bench_experts(Bench& b, const std::string& name, int n_experts, const std::vector<int>& k2s, const PeerExperts* peer) {
  const auto suh = scales(b, kModel, 1 / std::sqrt(double(kModel)), "suh"), svh = scales(b, kModel, 1, "svh");
  const Layer layer = make_layer(b, n_experts, k2s, suh.data(), svh.data());
  const ExpertTable table = taken(ExpertTable::create(b.stream, layer.experts));
  const int n_routings = 12;
  const CounterRng rng(4, "routing");
  const std::vector<float> x = gaussian(8 * kModel, "x");
  const auto in = taken(DeviceArray<float>::upload(b.stream, x, "x"));
  const auto out = taken(DeviceArray<float>::allocate(0, 8 * kModel, "y"));
  const auto weights = taken(DeviceArray<float>::upload(b.stream, std::vector<float>(kMaxSlots, 1.0f / kActive), "weights"));
  std::printf("%s, %d experts resident, mean width %.2f\n", name.c_str(), n_experts, layer.mean_width);
  double one_token = 0, one_distinct = 0;
  for (int t = 0; t < 4; ++t) {
    const int tokens = kTokens[t];
    // A plan and routing of its own for every call of the graph, made before it.
    std::vector<DeviceArray<int32_t>> ids;
    std::vector<ExpertsScratch> scratch;
    std::vector<int32_t> first_ids;
    double distinct = 0, bytes = 0;
    for (int r = 0; r < n_routings; ++r) {
      std::vector<int32_t> of;
      std::vector<char> seen(static_cast<size_t>(n_experts), 0);
      for (int i = 0; i < tokens; ++i) {
        std::vector<int32_t> mine;
        for (uint64_t c = 0; mine.size() < kActive; ++c) {
          const int32_t id = static_cast<int32_t>(rng.bits(static_cast<uint64_t>(r * 64 + i + 1000 * tokens) * 4096 + c) % static_cast<uint64_t>(n_experts));
          if (std::find(mine.begin(), mine.end(), id) == mine.end()) mine.push_back(id);
        }
        for (int32_t id : mine) {
          of.push_back(id);
          if (seen[static_cast<size_t>(id)]++ == 0) {
            const ExpertMatrices& m = layer.experts[static_cast<size_t>(id)];
            distinct += 1.0 / n_routings;
            bytes += 4.0 / n_routings * static_cast<double>(layout_words(kModel, kFf, m.gate.k2 + m.up.k2 + m.down.k2));
          }
        }
      }
      if (r == 0) first_ids = of;
      ids.push_back(taken(DeviceArray<int32_t>::upload(b.stream, of, "ids")));
      scratch.push_back(taken(ExpertsScratch::create(b.stream, kModel, kFf)));
    }
    const auto params = [&](int r) {
      ExpertsParams p;
      p.x = in.data(), p.ids = ids[static_cast<size_t>(r)].data(), p.weights = weights.data(), p.y = out.data();
      p.n_tokens = tokens, p.n_active = kActive, p.limit = 7.0f;
      return p;
    };
    for (int r = 0; r < n_routings; ++r) must(plan_experts(b.stream, table, params(r), scratch[static_cast<size_t>(r)]));
    const double us = b.microseconds(2 * n_routings, [&](int i) {
      return run_experts(b.stream, table, params(i % n_routings), scratch[static_cast<size_t>(i % n_routings)]);
    });
    const double with_plan = b.microseconds(2 * n_routings, [&](int i) -> Status {
      RETURN_IF_ERROR(plan_experts(b.stream, table, params(i % n_routings), scratch[static_cast<size_t>(i % n_routings)]));
      return run_experts(b.stream, table, params(i % n_routings), scratch[static_cast<size_t>(i % n_routings)]);
    });
    double error = 0;
    if (tokens == 1) {
      must(run_experts(b.stream, table, params(0), scratch[0]));
      error = experts_error(b, layer, first_ids, x, taken(out.download(b.stream)));
      one_token = us, one_distinct = distinct;
    }
    std::printf("  %d tokens, %.1f experts: %6.1f us (with plan %6.1f)  (%.0f GB/s, %.1f %% of copy, %.1f w/SM-cycle", tokens, distinct, us, with_plan,
                bytes * 1e-3 / us, bytes * 1e-1 / us / b.copy_gb_s, b.weights_per_cycle(distinct * 3 * kModel * kFf, us));
    if (peer != nullptr) std::printf("; peer %.0f us, ratio %.2f", peer->us[t], peer->us[t] / us);
    if (tokens == 1) std::printf("; error %.1e", error);
    if (tokens == 6) std::printf("; %.2f us per further expert", (us - one_token) / (distinct - one_distinct));
    std::printf(")\n");
  }
}

void bench_decode(Bench& b) {
  std::printf("\ndecoding a 5120 x 2304 matrix, us (GB/s packed bytes read and values written; exllamav3 v1.4.1: inner 13.3 to 15.1, weight 24.0 to 26.4)\n");
  for (int width = 2; width <= 5; ++width) {
    const int n = 16;
    const size_t words = static_cast<size_t>(layout_words(kModel, kFf, 2 * width));
    const DeviceArray<uint32_t> blocks = random_words(b, words * n, 7);
    const auto suh = scales(b, kModel, 1, "suh"), svh = scales(b, kFf, 1, "svh");
    const auto out = taken(DeviceArray<uint16_t>::allocate(0, size_t{kModel} * kFf * n, "out"));
    const auto matrix = [&](int i) {
      return DeviceMatrix{blocks.data() + words * static_cast<size_t>(i), suh.data(), svh.data(), kModel, kFf, 2 * width, Codebook::kMul1};
    };
    const double bytes = 4.0 * static_cast<double>(words) + 2.0 * kModel * kFf;
    const double inner = b.microseconds(n, [&](int i) { return decode_inner_f16(b.stream, matrix(i), out.data() + size_t{kModel} * kFf * static_cast<size_t>(i)); });
    const double weight = b.microseconds(n, [&](int i) {
      return decode_weight(b.stream, matrix(i), WeightType::kBF16, out.data() + size_t{kModel} * kFf * static_cast<size_t>(i));
    });
    std::printf("  K=%d: inner f16 %.1f (%.0f GB/s), weight bf16 %.1f (%.0f GB/s)\n", width, inner, bytes * 1e-3 / inner, weight, bytes * 1e-3 / weight);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
  const auto devices = device::list_devices();
  if (!devices.ok()) {
    std::printf("no GPU bench: %s\n", devices.error().message().c_str());
    return 0;
  }
  Bench b;
  std::printf("%s, clock up to %d MHz, driver CUDA %d, built with CUDA %d\n", b.info.text().c_str(), b.info.clock_khz / 1000, b.info.driver_version,
              b.info.runtime_version);
  bench_machine(b);
  bench_products(b, quick);
  std::printf("\nexperts of a layer, top %d, %d x %d, mul1, clamped SwiGLU: us a layer\n", kActive, kModel, kFf);
  for (const PeerExperts& peer : kPeerExperts) {
    if (quick && peer.width != 3) continue;
    bench_experts(b, "K=" + std::to_string(peer.width), 384, {2 * peer.width}, &peer);
  }
  // 2, 3, 4, 5 per tensor at a mean of 2.8.
  bench_experts(b, "mix of 2 to 5", 384, {4, 4, 4, 4, 6, 6, 6, 6, 8, 10}, nullptr);
  bench_experts(b, "mix of 2, 3, 4", 384, {4, 4, 6, 6, 8}, nullptr);
  if (!quick) bench_decode(b);
  return 0;
}
