// How long does quantizing take on a GPU: the trellis search alone, a 5120x2304 matrix alone and in a group of 8, and a
// whole model?
//
// Method: weights 0.02 * N(0, 1); Hessians as in the recorded figures of exllamav3: none (identity), or power-1:
// eigenvalues proportional to 1/(i+1) with mean 1 and eigenvectors of a random orthogonal matrix, here Q = B D1 B D2 B
// with B a Hadamard transform over blocks that overlap and D random signs. Search: device time of 33,792 Gaussian
// tiles, the least of two. Matrices: wall time of quantize_group_on_device without refit and without feedback along
// outputs (as exllamav3), and with it; by part; and group after group, the next prepared by another thread while the
// device works on this one. Usage: bench_gpu_quantize [seconds per part are printed for K = 2 3 4 | K...]
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <string>
#include <vector>

#include "base/rng.h"
#include "codec/cuda/quantizer.h"
#include "codec/cuda/viterbi.h"
#include "codec/weight_scales.h"
#include "device/device.h"

namespace {

using namespace espalier;
using namespace espalier::codec;

constexpr int64_t kRows = 5120, kColumns = 2304, kGroup = 8;

double gaussian(const CounterRng& rng, uint64_t i) {
  return std::sqrt(-2 * std::log(1 - rng.uniform(2 * i))) * std::cos(6.283185307179586 * rng.uniform(2 * i + 1));
}

template <typename T>
T value_of(Result<T> result) {
  if (!result.ok()) {
    std::fprintf(stderr, "%s\n", result.error().message().c_str());
    std::exit(1);
  }
  return std::move(result).value();
}

void check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// One orthogonal factor applied along both sides of a symmetric h: Hadamard transforms over 1024 neighbours from
// `first` on, then signs.
void mix(std::vector<double>& h, int64_t k, int64_t first, const CounterRng& signs, ThreadPool& pool) {
  constexpr int64_t kEdge = 1024;
  const auto along = [&](auto at) {
    pool.parallel_for(k, 16, [&](int64_t begin, int64_t end) {
      std::vector<double> v(kEdge);
      for (int64_t line = begin; line < end; ++line) {
        for (int64_t block = 0; block < k; block += kEdge) {
          for (int64_t i = 0; i < kEdge; ++i) v[static_cast<size_t>(i)] = h[at(line, (first + block + i) % k)];
          for (int64_t d = 1; d < kEdge; d *= 2) {
            for (int64_t i = 0; i < kEdge; ++i) {
              if ((i & d) != 0) continue;
              const double a = v[static_cast<size_t>(i)], b = v[static_cast<size_t>(i + d)];
              v[static_cast<size_t>(i)] = a + b;
              v[static_cast<size_t>(i + d)] = a - b;
            }
          }
          for (int64_t i = 0; i < kEdge; ++i) {
            const int64_t j = (first + block + i) % k;
            h[at(line, j)] = v[static_cast<size_t>(i)] / 32.0 * signs.sign(static_cast<uint64_t>(j));
          }
        }
      }
    });
  };
  along([&](int64_t line, int64_t i) { return static_cast<size_t>(line * k + i); });
  along([&](int64_t line, int64_t i) { return static_cast<size_t>(i * k + line); });
}

std::vector<double> power_hessian(int64_t k, ThreadPool& pool) {
  std::vector<double> h(static_cast<size_t>(k * k));
  double sum = 0;
  for (int64_t i = 0; i < k; ++i) sum += 1.0 / static_cast<double>(i + 1);
  for (int64_t i = 0; i < k; ++i)
    h[static_cast<size_t>(i * k + i)] = static_cast<double>(k) / static_cast<double>(i + 1) / sum;
  for (int round = 0; round < 3; ++round)
    mix(h, k, round * 512, CounterRng(static_cast<uint64_t>(round), "signs"), pool);
  return h;
}

void bench_search(device::Stream& stream, int k2) {
  constexpr int64_t kTiles = 132 * 256;
  const CounterRng rng(1, "tiles");
  std::vector<float> tiles(static_cast<size_t>(kTiles * kTileSize));
  ThreadPool pool;
  pool.parallel_for(kTiles, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * kTileSize; i < end * kTileSize; ++i) {
      tiles[static_cast<size_t>(i)] =
          static_cast<float>(gaussian(rng, static_cast<uint64_t>(i)) * best_spread(Codebook::kMul1, k2));
    }
  });
  DeviceSearchOptions options;
  options.search.k2 = k2;
  DeviceSearch search = value_of(DeviceSearch::create(stream, options));
  const auto in = value_of(device::DeviceArray<float>::upload(stream, tiles, "tiles"));
  const auto states = value_of(device::DeviceArray<uint16_t>::allocate(stream.device(), tiles.size(), "states"));
  const auto begin = value_of(device::Event::create(stream.device()));
  const auto end = value_of(device::Event::create(stream.device()));
  double least = 1e30;
  for (int repeat = 0; repeat < 2; ++repeat) {
    check(const_cast<device::Event&>(begin).record(stream));
    check(search.search(stream, in.data(), kTiles, states.data()));
    check(const_cast<device::Event&>(end).record(stream));
    check(stream.synchronize());
    least = std::min(least, value_of(end.milliseconds_since(begin)));
  }
  const int64_t n_float = value_of(search.count_float_tiles(stream)) / 2;
  std::printf("search  K=%-3s  %d tiles a block  %8.1f k tiles/s  %6.1f M weights/s  fp32 again %.2f %%\n",
              width_text(k2).c_str(), search.tiles_per_block(), 1e-3 * kTiles / (1e-3 * least),
              1e-6 * kTiles * kTileSize / (1e-3 * least), 100.0 * static_cast<double>(n_float) / kTiles);
  std::fflush(stdout);
}

std::vector<GroupMember> members_of(const std::vector<float>& weights, int64_t n_members, const double* hessian) {
  std::vector<GroupMember> members;
  for (int64_t m = 0; m < n_members; ++m)
    members.push_back({weights.data() + m * kRows * kColumns, hessian, "matrix" + std::to_string(m)});
  return members;
}

QuantizeOptions options_for(int k2, bool two_sided) {
  QuantizeOptions options;
  options.k2 = k2;
  options.refit_rounds = 0;
  options.two_sided = two_sided;
  return options;
}

// What was measured, a matrix.
void print_row(const std::string& what, int k2, bool two_sided, double seconds, const GroupTimes& t,
               const std::vector<QuantizedMatrix>& results, int64_t n_matrices) {
  double error = 0, mse = 0;
  for (const QuantizedMatrix& r : results) {
    error += r.true_error / static_cast<double>(results.size());
    mse += r.relative_mse / static_cast<double>(results.size());
  }
  const double each = 1.0 / static_cast<double>(n_matrices);
  std::printf("matrix  K=%-3s  %s %s  %.3f s each: scales %.3f, upload %.3f, factor %.3f, LDLQ and search %.3f, measure %.3f"
              "  true error %.6f  relative mse %.6f  fp32 again %.2f %%\n",
              width_text(k2).c_str(), what.c_str(), two_sided ? "two-sided" : "one-sided", seconds * each, t.scales * each,
              t.upload * each, t.factor * each, t.search * each, t.measure * each, error, mse,
              100.0 * static_cast<double>(t.n_float_tiles) * kTileSize * each / (kRows * kColumns));
  std::fflush(stdout);
}

void bench_group(device::Stream& stream, const std::vector<float>& weights, int64_t n_members, const double* hessian,
                 const char* kind, int k2, bool two_sided, ThreadPool& pool) {
  GroupTimes t;
  const double start = now();
  const auto results = value_of(quantize_group_on_device(stream, members_of(weights, n_members, hessian), kRows, kColumns,
                                                         options_for(k2, two_sided), pool, &t));
  print_row(std::to_string(n_members) + " of 5120x2304, " + kind, k2, two_sided, now() - start, t, results, n_members);
}

// As a conversion runs: group after group, the next prepared by another thread while the device searches this one. Seconds a
// matrix of kGroups groups, from the moment at which the first is prepared.
double bench_groups(device::Stream& stream, const std::vector<float>& weights, const double* hessian, int k2, bool two_sided,
                    ThreadPool& pool) {
  constexpr int kGroups = 3;
  const std::vector<GroupMember> members = members_of(weights, kGroup, hessian);
  const QuantizeOptions options = options_for(k2, two_sided);
  device::Stream upload_stream = value_of(device::Stream::create(stream.device()));
  GroupTimes t;
  PreparedGroup group = value_of(prepare_group(upload_stream, members, kRows, kColumns, options, pool, &t));
  t = GroupTimes();
  std::vector<QuantizedMatrix> results;
  const double start = now();
  for (int i = 0; i < kGroups; ++i) {
    GroupTimes prepare_times;
    // The last prepares one too many, so that as many are prepared as are quantized.
    std::future<Result<PreparedGroup>> next = std::async(std::launch::async, [&] {
      return prepare_group(upload_stream, members, kRows, kColumns, options, pool, &prepare_times);
    });
    results = value_of(quantize_prepared_group(stream, std::move(group), &t));
    group = value_of(next.get());
    t.scales += prepare_times.scales, t.upload += prepare_times.upload;
  }
  const double seconds = now() - start;
  print_row("3 groups of 8, power-1, next prepared meanwhile,", k2, two_sided, seconds, t, results, kGroups * kGroup);
  return seconds / (kGroups * kGroup);
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<int> widths;
  for (int i = 1; i < argc; ++i) widths.push_back(value_of(width_from_bits(std::atof(argv[i]))));
  if (widths.empty()) widths = {4, 6, 8};
  device::Stream stream = value_of(device::Stream::create(0));
  ThreadPool pool;
  std::printf("%s, mul1, %d CPU threads\n", value_of(device::list_devices())[0].text().c_str(), pool.n_threads());
  for (int k2 : {2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16}) bench_search(stream, k2);

  std::vector<float> weights(static_cast<size_t>(kGroup * kRows * kColumns));
  const CounterRng rng(2, "weights");
  pool.parallel_for(kGroup * kRows, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * kColumns; i < end * kColumns; ++i)
      weights[static_cast<size_t>(i)] = static_cast<float>(0.02 * gaussian(rng, static_cast<uint64_t>(i)));
  });
  const std::vector<double> power = power_hessian(kRows, pool);
  for (int k2 : widths) {
    bench_group(stream, weights, 1, nullptr, "identity", k2, false, pool);
    bench_group(stream, weights, 1, power.data(), "power-1", k2, false, pool);
    bench_group(stream, weights, kGroup, power.data(), "power-1", k2, true, pool);
    bench_group(stream, weights, kGroup, power.data(), "power-1", k2, false, pool);
    bench_groups(stream, weights, power.data(), k2, true, pool);
    const double seconds = bench_groups(stream, weights, power.data(), k2, false, pool);
    // DeepSeek-V4.1-Flash: 40 layers of 384 routed experts with gate, up (5120x2304) and down.
    std::printf("model   K=%-3s  40 layers x 384 experts x 3 matrices at %.3f s: %.2f hours on one such GPU\n",
                width_text(k2).c_str(), seconds, 40.0 * 384 * 3 * seconds / 3600);
    std::fflush(stdout);
  }
  return 0;
}
