// How long does every operation of the network take on this GPU at the released sizes, and how far is that from moving its bytes once?
//
// Method: 24 calls recorded in one CUDA graph, each on its own copy of whatever is read once (weights, keys) as long as all copies fit in
// 4 GB; time of a replay between two events over 24, median of 9. Bytes: inputs read and outputs written once. Small operations are bound
// by the launch, which an empty kernel shows.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/check.h"
#include "codec/cuda/rows_product.h"
#include "device/buffer.h"
#include "device/device.h"
#include "device/graph.h"
#include "device/stream.h"
#include "ops/cuda/attention.h"
#include "ops/cuda/attention_fast.h"
#include "ops/cuda/native_product.h"
#include "ops/cuda/rows.h"
#include "ops/cuda/selection.h"
#include "ops/cuda/streams.h"

namespace {

using namespace espalier;
using ops::cuda::NativeForm;
using ops::cuda::Order;

template <typename T>
T taken(Result<T> result) {
  CHECK(result.ok()) << result.error().message();
  return std::move(result).value();
}
void must(const Status& status) { CHECK(status.ok()) << status.message(); }

__global__ void empty_kernel() {}

// Floats in (-1, 1), or bytes without NaN in any format.
__global__ void fill_kernel(uint32_t* to, size_t n, uint32_t seed, bool is_float) {
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += size_t{gridDim.x} * blockDim.x) {
    uint32_t z = (static_cast<uint32_t>(i) + seed) * 0x9E3779B9u;
    z = (z ^ (z >> 16)) * 0x85EBCA6Bu, z = (z ^ (z >> 13)) * 0xC2B2AE35u, z ^= z >> 16;
    to[i] = is_float ? __float_as_uint((static_cast<float>(z >> 8) - 8388608.0f) / 8388608.0f) : z & 0xBFBFBFBFu;
  }
}

constexpr int kCalls = 24;
constexpr int64_t kD = 5120, kStreams = 4, kExperts = 384, kHeads = 64, kDim = 512;

struct Bench {
  device::Stream stream = taken(device::Stream::create(0));
  std::vector<std::shared_ptr<device::DeviceBuffer>> kept;
  double gb_s = 0;

  void* memory(size_t size, bool is_float = true) {
    auto buffer = std::make_shared<device::DeviceBuffer>(taken(device::DeviceBuffer::allocate(0, (size + 15) / 16 * 16, "bench")));
    fill_kernel<<<1024, 256, 0, stream.handle()>>>(static_cast<uint32_t*>(buffer->data()), (size + 3) / 4, static_cast<uint32_t>(kept.size()), is_float);
    must(stream.launched("fill_kernel"));
    kept.push_back(buffer);
    return buffer->data();
  }
  float* floats(int64_t n) { return static_cast<float*>(memory(static_cast<size_t>(n) * 4)); }
  template <typename T>
  T* up(const std::vector<T>& values) {
    T* to = static_cast<T*>(memory(values.size() * sizeof(T)));
    must(stream.copy_to_device(to, values.data(), values.size() * sizeof(T)));
    return to;
  }

  double microseconds(const std::function<Status(int)>& call) {
    must(call(0));
    must(stream.synchronize());
    const device::Graph graph = taken(device::Graph::capture(stream, [&]() -> Status {
      for (int i = 0; i < kCalls; ++i) RETURN_IF_ERROR(call(i));
      return ok_status();
    }));
    device::Event start = taken(device::Event::create()), stop = taken(device::Event::create());
    std::vector<double> times;
    for (int i = -1; i < 9; ++i) {
      must(start.record(stream));
      must(graph.launch(stream));
      must(stop.record(stream));
      const double ms = taken(stop.milliseconds_since(start));
      if (i >= 0) times.push_back(1e3 * ms / kCalls);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }
  void row(const std::string& name, double bytes, const std::function<Status(int)>& call) {
    const double us = microseconds(call), got = 1e-3 * bytes / us;
    std::printf("%-64s %9.2f us %8.0f GB/s %6.1f %% of copy\n", name.c_str(), us, got, 100 * got / gb_s);
  }
};

void bench_products(Bench& b) {
  struct Matrix {
    const char* name;
    NativeForm form;
    int64_t in, out;
  };
  constexpr Matrix kMatrices[] = {{"mHC fn, f32", NativeForm::kF32, 20480, 24},     {"router, bf16", NativeForm::kBf16, 5120, 384},
                                  {"compressor, bf16", NativeForm::kBf16, 5120, 512}, {"head, bf16", NativeForm::kBf16, 5120, 129280},
                                  {"wq_a, fp8", NativeForm::kFp8, 5120, 1280},        {"wq_b, fp8", NativeForm::kFp8, 1280, 32768},
                                  {"shared w1, fp8", NativeForm::kFp8, 5120, 2304},   {"expert w1, mxfp4", NativeForm::kMxfp4, 5120, 2304}};
  for (const Matrix& m : kMatrices) {
    const double bits = m.form == NativeForm::kF32 ? 32 : m.form == NativeForm::kBf16 ? 16 : m.form == NativeForm::kFp8 ? 8 : 4.25;
    const double size = bits / 8 * static_cast<double>(m.in * m.out);
    const int copies = static_cast<int>(std::clamp(4e9 / size, 1.0, double(kCalls)));
    std::vector<ops::cuda::NativeWeight> w(static_cast<size_t>(copies));
    for (auto& of : w) {
      of.form = m.form, of.in = m.in, of.out = m.out;
      of.weight = static_cast<const uint8_t*>(b.memory(static_cast<size_t>(size) + 64, m.form == NativeForm::kF32));
      of.block_rows = m.form == NativeForm::kFp8 ? 32 : 1, of.scale_cols = m.in / 32;
      of.scale = static_cast<const uint8_t*>(b.memory(static_cast<size_t>(of.scale_cols * m.out), false));
    }
    const float* x = b.floats(8 * m.in);
    float* y = b.floats(8 * m.out);
    for (int64_t rows : {1, 8}) {
      const std::string name = std::string(m.name) + ", " + std::to_string(rows) + (rows == 1 ? " row" : " rows");
      b.row(name + ", fast order", size, [&](int i) {
        return ops::cuda::multiply_native_fast(b.stream, {w[static_cast<size_t>(i % copies)], x, m.in, y, m.out, rows});
      });
      b.row(name + ", CPU's order", size, [&](int i) {
        codec::cuda::RowsProductParams p;
        p.weight = codec::cuda::weight_of(w[static_cast<size_t>(i % copies)]);
        p.x = x, p.x_stride = m.in, p.y = y, p.y_stride = m.out, p.n_rows = rows;
        return codec::cuda::multiply_rows(b.stream, p);
      });
    }
    b.kept.clear();
  }
}

void bench_rows(Bench& b, int64_t n) {
  const std::string rows = ", " + std::to_string(n) + (n == 1 ? " row" : " rows");
  const double row_bytes = 4.0 * static_cast<double>(n * kD);
  float *h = b.floats(n * kStreams * kD), *out = b.floats(n * kStreams * kD), *x = b.floats(n * kHeads * kDim), *y = b.floats(n * kHeads * kDim);
  float *weight = b.floats(kStreams * kD), *small = b.floats(n * 1024), *kv = b.floats(n * 5 * kD);
  for (Order order : {Order::kFast, Order::kCpu}) {
    const std::string name = rows + (order == Order::kFast ? ", fast order" : ", CPU's order");
    b.row("rms_norm of 5120" + name, 2 * row_bytes, [&](int) { return ops::cuda::rms_norm(b.stream, {x, weight, y, n, kD, 1e-20}, order); });
    b.row("mhc_collapse_normalised 4 x 5120" + name, 5 * row_bytes,
          [&](int) { return ops::cuda::mhc_collapse_normalised(b.stream, {h, small, y, n, kStreams, kD}, weight, 1e-20, order); });
    ops::MhcCoefficientsParams m;
    m.h = h, m.dots = small, m.scale = weight, m.base = weight, m.pre = y, m.post = y + 4096, m.comb = y + 8192;
    m.n_rows = n, m.n_streams = kStreams, m.d_model = kD, m.sinkhorn_iters = 20, m.norm_eps = 1e-20, m.hc_eps = 1e-6f;
    b.row("mhc_coefficients of 4 x 5120" + name, 4 * row_bytes, [&](int) { return ops::cuda::mhc_coefficients(b.stream, m, order); });
    b.row("engram_gate 4 x 5120" + name, 13 * row_bytes,
          [&](int) { return ops::cuda::engram_gate(b.stream, {out, kv, weight, weight, n, kStreams, kD, 1e-20}, order); });
  }
  b.row("mhc_expand 4 x 5120" + rows, 9 * row_bytes, [&](int) { return ops::cuda::mhc_expand(b.stream, {x, h, small, small + 64, out, n, kStreams, kD}); });
  const int64_t* positions = b.up(std::vector<int64_t>(static_cast<size_t>(n), 70000));
  b.row("rope of 64 x 64 in 64 x 512" + rows, 8.0 * static_cast<double>(n * kHeads * 64),
        [&](int) { return ops::cuda::rope(b.stream, {x, positions, n, kHeads, kDim, 64, weight, false}); });
  b.row("swiglu of 2304" + rows, 12.0 * static_cast<double>(n * 2304), [&](int) { return ops::cuda::swiglu(b.stream, {x, y, nullptr, out, n, 2304, 10.0f}); });
  b.row("fake_quant act of 512" + rows, 8.0 * static_cast<double>(n * kDim),
        [&](int) { return ops::cuda::fake_quant(b.stream, {y, n, kDim, ops::FakeQuantFormat::kAct}); });
  ops::RouterParams r;
  r.logits = x, r.bias = weight, r.scores = y, r.ids = static_cast<int32_t*>(b.memory(4096)), r.weights = small;
  r.n_rows = n, r.n_experts = kExperts, r.n_active = 6, r.temperature = 1, r.scale = 1.5f;
  b.row("router of 384" + rows, 4.0 * static_cast<double>(n * kExperts), [&](int) { return ops::cuda::router(b.stream, r); });
  b.kept.clear();
}

void bench_attention(Bench& b, int64_t n, int64_t places) {
  const std::string name = "attention, 64 heads of 512, " + std::to_string(n) + (n == 1 ? " row, " : " rows, ") + std::to_string(places) + " places";
  const double bytes = 4.0 * static_cast<double>(n * places * kDim + 2 * n * kHeads * kDim);
  float *q = b.floats(n * kHeads * kDim), *kv = b.floats(kCalls * n * places * kDim), *out = b.floats(n * kHeads * kDim);
  std::vector<ops::AttentionParams> calls;
  int64_t parts_size = 0;
  for (int i = 0; i < kCalls; ++i) {
    std::vector<const float*> keys;
    std::vector<int64_t> begin = {0};
    for (int64_t t = 0; t < n; ++t) {
      for (int64_t j = 0; j < places; ++j) keys.push_back(kv + ((i * n + t) * places + j) * kDim);
      begin.push_back((t + 1) * places);
    }
    ops::AttentionParams p;
    p.q = q, p.keys = b.up(keys), p.key_begin = b.up(begin), p.sink = q, p.out = out, p.n_rows = n, p.n_heads = kHeads, p.head_dim = kDim, p.scale = 0.044f;
    calls.push_back(p);
    parts_size = ops::cuda::attention_parts_size(p, places);
  }
  float* parts = b.floats(parts_size + 4);
  b.row(name + ", fast order", bytes, [&](int i) { return ops::cuda::attention_fast(b.stream, calls[static_cast<size_t>(i)], places, parts); });
  b.row(name + ", CPU's order", bytes, [&](int i) { return ops::cuda::attention(b.stream, calls[static_cast<size_t>(i)], places); });
  b.kept.clear();
}

void bench_selection(Bench& b, int64_t n, int64_t entries) {
  const std::string name = ", " + std::to_string(n) + (n == 1 ? " row, " : " rows, ") + std::to_string(entries) + " entries";
  const int64_t heads = 32, dim = 128;
  ops::IndexScoresParams s;
  s.queries = b.floats(n * heads * dim), s.weights = b.floats(n * heads), s.key_panels = b.floats(entries * dim), s.out = b.floats(n * entries);
  std::vector<int64_t> begin;
  for (int64_t t = 0; t < n; ++t) begin.push_back(t * entries);
  s.n_visible = b.up(std::vector<int64_t>(static_cast<size_t>(n), entries)), s.out_begin = b.up(begin), s.n_rows = n, s.n_heads = heads, s.dim = dim;
  b.row("index_scores 32 x 128" + name, 4.0 * static_cast<double>(entries * dim + n * entries), [&](int) { return ops::cuda::index_scores(b.stream, s, entries); });
  ops::cuda::SelectParams k;
  k.scores = s.out, k.begin = s.out_begin, k.n = s.n_visible, k.k = 512, k.entries_stride = 512, k.n_rows = n;
  k.entries = static_cast<int32_t*>(b.memory(static_cast<size_t>(n) * 2048)), k.n_selected = static_cast<int64_t*>(b.memory(static_cast<size_t>(n) * 8));
  b.row("select_top_k 512" + name, 4.0 * static_cast<double>(n * entries), [&](int) { return ops::cuda::select_top_k(b.stream, k); });
  b.kept.clear();
}

}  // namespace

int main() {
  const auto devices = device::list_devices();
  if (!devices.ok()) {
    std::printf("no GPU bench: %s\n", devices.error().message().c_str());
    return 0;
  }
  Bench b;
  const size_t size = size_t{1} << 30;
  void *from = b.memory(size), *to = b.memory(size);
  device::Event start = taken(device::Event::create()), stop = taken(device::Event::create());
  double best = 1e9;
  for (int i = 0; i < 9; ++i) {
    must(start.record(b.stream));
    must(b.stream.copy_on_device(to, from, size));
    must(stop.record(b.stream));
    best = std::min(best, taken(stop.milliseconds_since(start)));
  }
  b.kept.clear();
  b.gb_s = 2e-6 * static_cast<double>(size) / best;
  std::printf("%s; copy of 1 GiB: %.0f GB/s read and written; empty kernel in a graph: %.2f us\n", devices->front().text().c_str(), b.gb_s,
              b.microseconds([&](int) {
                empty_kernel<<<132, 256, 0, b.stream.handle()>>>();
                return b.stream.launched("empty_kernel");
              }));
  for (int64_t n : {1, 8}) bench_attention(b, n, 640);
  bench_attention(b, 1, 128);
  for (int64_t entries : {4096, 65536}) {
    for (int64_t n : {1, 8}) bench_selection(b, n, entries);
  }
  for (int64_t n : {1, 8, 256}) bench_rows(b, n);
  bench_products(b);
  return 0;
}
