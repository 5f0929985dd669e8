// How long does the network take on this GPU, and how far is that from reading its bytes once?
//
// Method: random weights in the released widths (bench/gpu_network/synthetic.h), nine layers of every kind. After a prompt, calls of 1, 2, 4,
// 6 and 8 rows and of whole chunks; the time of a call is that on the host's clock from ids to logits, median of 9. Then one call is run
// again with an event at the end of every layer, and another with an event after every kernel of the main stream (what runs on branches
// beside it is seen as waiting); an event inside a recorded pass costs some microseconds, so the second sum is larger. Floor: bytes that
// the call must read (weights in stored form, of the experts as many as are chosen on average, caches) over the bandwidth of a copy measured
// in the same run.
// Usage: bench_gpu_network [--form exl3|native] [--products exact|int8r] [--widths 3 | 2,3,4,5] [--context N] [--short] [--no-graphs]
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "bench/gpu_network/synthetic.h"
#include "device/buffer.h"
#include "device/device.h"
#include "device/stream.h"

namespace {

using namespace espalier;
using namespace espalier::bench;
using device::Stream;

template <typename T>
T taken(Result<T> result) {
  CHECK(result.ok()) << result.error().message();
  return std::move(result).value();
}
void must(const Status& status) { CHECK(status.ok()) << status.message(); }

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

double copy_gb_s(Stream& stream) {
  const size_t size = size_t{1} << 30;
  const auto from = taken(device::DeviceBuffer::allocate(0, size, "copy")), to = taken(device::DeviceBuffer::allocate(0, size, "copy"));
  must(stream.fill_bytes(from.data(), 0x5A, size));
  device::Event start = taken(device::Event::create()), stop = taken(device::Event::create());
  std::vector<double> times;
  for (int i = 0; i < 9; ++i) {
    must(start.record(stream));
    must(stream.copy_on_device(to.data(), from.data(), size));
    must(stop.record(stream));
    times.push_back(taken(stop.milliseconds_since(start)));
  }
  return 2e-6 * static_cast<double>(size) / median(times);
}

struct Bench {
  SyntheticNetwork network;
  std::unique_ptr<cuda::DeviceSequence> sequence;
  double gb_s = 0;
  uint64_t n_ids = 0;

  std::vector<int32_t> ids(int64_t n) {
    std::vector<int32_t> out;
    for (int64_t i = 0; i < n; ++i) out.push_back(static_cast<int32_t>((++n_ids * 2654435761ull >> 7) % 120000));
    return out;
  }

  // Bytes that `n` rows at a context of `position` tokens must read in a layer.
  double floor_bytes(int layer, int64_t n, int64_t position) const {
    const Config& c = network.model->config();
    const double distinct = static_cast<double>(c.n_experts) * (1 - std::pow(1 - double(c.n_active) / double(c.n_experts), double(n)));
    double bytes = network.dense_bytes[static_cast<size_t>(layer)] + distinct * network.expert_bytes[static_cast<size_t>(layer)];
    bytes += 4.0 * static_cast<double>(c.head_dim * std::min(position + n, c.window + n));
    if (c.ratio(layer) > 0) {
      const int64_t entries = position / c.ratio(layer);
      bytes += 4.0 * static_cast<double>(c.head_dim * std::min(entries, c.index_topk * n));
      if (c.is_index_source(layer)) bytes += 4.0 * static_cast<double>(entries * c.index_head_dim);
    }
    return bytes;
  }

  void call(int64_t n) { taken(sequence->forward(ids(n), false)); }

  // A call of n rows without what the host does before the pass runs.
  std::vector<Stream::Timed> profiled(int64_t n, Stream::Detail detail) {
    Stream& stream = sequence->stream();
    must(stream.begin_profile(detail));
    call(n);
    stream.end_profile();
    std::vector<Stream::Timed> timed = taken(stream.profile());
    std::erase_if(timed, [](const Stream::Timed& t) { return std::string_view(t.kernel) == "recording" || std::string_view(t.kernel) == "host before a pass"; });
    return timed;
  }

  // Rows at a time; prints the table.
  void measure(int64_t n, bool prints_groups) {
    const int64_t position = sequence->n_tokens();
    for (int i = 0; i < 4; ++i) call(n);  // launches first, then recorded; both phases of an odd number of rows
    std::vector<double> wall;
    for (int i = 0; i < 9; ++i) {
      const auto start = std::chrono::steady_clock::now();
      call(n);
      wall.push_back(1e6 * std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    std::map<int, double> layers;
    double all = 0;
    for (const Stream::Timed& t : profiled(n, Stream::Detail::kSteps)) {
      const size_t at = t.step.find("layer ");
      layers[at == std::string::npos ? -1 : std::atoi(t.step.c_str() + at + 6)] += t.microseconds;
      all += t.microseconds;
    }
    double bytes = network.head_bytes;
    std::printf("\n%lld rows at %lld tokens: a call %.0f us on the host's clock; on the device %.0f us\n", static_cast<long long>(n),
                static_cast<long long>(position), median(wall), all);
    const Config& c = network.model->config();
    for (int l = 0; l < c.n_layers; ++l) {
      const double floor = 1e-3 * floor_bytes(l, n, position) / gb_s;
      bytes += floor_bytes(l, n, position);
      std::printf("  layer %d %-24s %8.1f us  floor %6.1f us  %5.1f x\n", l, network.kinds[static_cast<size_t>(l)].c_str(), layers[l], floor, layers[l] / floor);
    }
    std::printf("  rest (ids, head, logits)         %8.1f us  floor %6.1f us  %5.1f x\n", layers[-1], 1e-3 * network.head_bytes / gb_s,
                layers[-1] / (1e-3 * network.head_bytes / gb_s));
    std::printf("  all: floor %.1f us, host clock %.1f x\n", 1e-3 * bytes / gb_s, median(wall) / (1e-3 * bytes / gb_s));
    if (!prints_groups) return;
    std::map<std::string, std::pair<double, int>> groups, kernels;
    all = 0;
    for (const Stream::Timed& t : profiled(n, Stream::Detail::kKernels)) {
      const size_t part = t.step.rfind(", ");
      auto& group = groups[part == std::string::npos ? "other" : t.step.substr(part + 2)];
      group.first += t.microseconds, ++group.second;
      auto& kernel = kernels[t.kernel];
      kernel.first += t.microseconds, ++kernel.second;
      all += t.microseconds;
    }
    print("group of operations", groups, all);
    print("kernel", kernels, all);
  }

  void print(const char* what, const std::map<std::string, std::pair<double, int>>& of, double all) {
    std::vector<std::pair<std::string, std::pair<double, int>>> sorted(of.begin(), of.end());
    std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.second.first > b.second.first; });
    for (const auto& [name, sum] : sorted) {
      std::printf("  %s %-36s %9.1f us %5.1f %%  %4d launches, %7.2f us each\n", what, name.c_str(), sum.first, 100 * sum.first / all, sum.second,
                  sum.first / sum.second);
    }
  }

  void prefill(int64_t n) {
    const int64_t position = sequence->n_tokens();
    const auto start = std::chrono::steady_clock::now();
    call(n);
    const double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("prefill of %lld tokens at %lld: %.1f ms, %.0f tokens/s through these layers and one row of the head\n", static_cast<long long>(n),
                static_cast<long long>(position), 1e3 * s, static_cast<double>(n) / s);
  }
};

}  // namespace

int main(int argc, char** argv) {
  SyntheticOptions options;
  int64_t context = 8192;
  bool is_short = false, uses_graphs = true;
  std::string widths = "3";
  for (int i = 1; i < argc; ++i) {
    const std::string a = argv[i], v = i + 1 < argc ? argv[i + 1] : "";
    if (a == "--short") is_short = true;
    if (a == "--no-graphs") uses_graphs = false;
    if (a == "--form") options.form = v == "native" ? Form::kNative : Form::kExl3;
    if (a == "--products") options.products = *products_from_name(v);
    if (a == "--widths") widths = v;
    if (a == "--context") context = std::atoll(v.c_str());
  }
  options.expert_k2s.clear();
  for (size_t at = 0; at < widths.size(); at = widths.find(',', at) == std::string::npos ? widths.size() : widths.find(',', at) + 1) {
    options.expert_k2s.push_back(static_cast<int>(std::lround(2 * std::atof(widths.c_str() + at))));
  }
  const auto devices = device::list_devices();
  if (!devices.ok()) {
    std::printf("no GPU bench: %s\n", devices.error().message().c_str());
    return 0;
  }
  Stream stream = taken(Stream::create(0));
  Bench b;
  b.gb_s = copy_gb_s(stream);
  const auto start = std::chrono::steady_clock::now();
  b.network = taken(make_network(options));
  std::printf("%s; %s, widths %s, products %s; %.1f GB of weights made in %.1f s; copy %.0f GB/s read and written\n", devices->front().text().c_str(),
              options.form == Form::kNative ? "FP8 and MXFP4" : "EXL3 mul1", widths.c_str(), std::string(products_name(options.products)).c_str(),
              1e-9 * static_cast<double>(b.network.model->size_bytes()),
              std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), b.gb_s);
  b.sequence = taken(cuda::DeviceSequence::create(b.network.model, {Numerics::kKvq, false, 256, uses_graphs}));
  b.call(3);  // module load
  b.prefill(512);
  b.prefill(2048);
  if (!is_short) b.measure(256, true);
  for (int64_t n : {1, 2, 4, 6, 8}) {
    if (!is_short || n == 1 || n == 8) b.measure(n, n == 1 || n == 8);
  }
  if (is_short) return 0;
  while (b.sequence->n_tokens() + 256 <= context) b.call(std::min<int64_t>(2048, context - b.sequence->n_tokens()));
  b.prefill(512);
  b.prefill(2048);
  for (int64_t n : {1, 8}) b.measure(n, true);
  return 0;
}
