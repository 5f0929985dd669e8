// Where does the time go when one matrix of a real size is encoded?
//
// Method: the quantizer's own steps, called one by one on a synthetic [k, n] matrix and Hessian; wall time with all threads. The
// search and its feedback are timed on one group of 128 columns with one thread and scaled to all groups and threads. One run of
// each: the steps are long.
// Usage: bench_quantizer_time [K [k n]]; default 3 bits, 5120 x 2304
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "base/rng.h"
#include "codec/block_ldl.h"
#include "codec/column_encoder.h"
#include "codec/error_metric.h"
#include "codec/rotated_problem.h"

namespace {

using namespace espalier;
using namespace espalier::codec;

std::string machine_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown CPU";
}

template <typename Body>
double seconds(const char* what, const Body& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  const double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::printf("%-58s %8.2f s\n", what, s);
  std::fflush(stdout);
  return s;
}

int run(double bits, int64_t k, int64_t n) {
  ThreadPool pool;
  ThreadPool one(1);
  const Result<int> k2 = width_from_bits(bits);
  if (!k2.ok() || k % kBlock != 0 || n % kBlock != 0) {
    std::fprintf(stderr, "expected a width and multiples of 128\n");
    return 2;
  }
  std::printf("%s, %s tier, %d threads; %lld x %lld, %s bits, mul1\n", machine_name().c_str(),
              std::string(simd_tier_name(best_simd_tier())).c_str(), pool.n_threads(), static_cast<long long>(k),
              static_cast<long long>(n), width_text(*k2).c_str());
  const CounterRng rng(1, "quantizer time");
  std::vector<float> weight(static_cast<size_t>(k * n));
  for (size_t i = 0; i < weight.size(); ++i) weight[i] = static_cast<float>(0.02 * (rng.uniform(2 * i) + rng.uniform(2 * i + 1) - 1));
  std::vector<double> h(static_cast<size_t>(k * k));  // 0.7^|i-j| plus a common part: positive definite
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < k; ++j) h[static_cast<size_t>(i * k + j)] = 0.1 + 0.9 * std::exp(-0.35 * std::abs(static_cast<double>(i - j)));
  }
  const std::vector<double> diagonal(static_cast<size_t>(k), 1.025);
  ScaleRequest request;
  request.weight = weight.data();
  request.k = k;
  request.n = n;
  request.diagonal = diagonal.data();
  request.spread = best_spread(Codebook::kMul1, *k2);
  request.name = "matrix";
  double total = 0;
  WeightScales scales;
  total += seconds("scales", [&] { scales = choose_scales(request).value(); });
  SideMetric input, output;
  input.size = k;
  total += seconds("rotate the Hessian", [&] { input.metric = rotate_metric(h, 0.025, scales.su, scales.suh, pool); });
  std::vector<double> factor = input.metric;
  total += seconds("Cholesky factorisation", [&] { cholesky_upper(factor.data(), k, pool); });
  total += seconds("feedback from the factor", [&] { input.feedback = block_ldl_feedback(factor.data(), k, pool); });
  std::vector<double> w;
  total += seconds("rotate the weight", [&] { w = rotate_weight(weight.data(), k, n, scales, pool); });
  output.size = kBlock;
  std::vector<double> identity(kBlock * kBlock);
  for (size_t j = 0; j < kBlock; ++j) identity[j * kBlock + j] = 1;
  output.metric = rotate_metric(identity, 0, {scales.sv.begin(), scales.sv.begin() + kBlock},
                                {scales.svh.begin(), scales.svh.begin() + kBlock}, pool);
  factor = output.metric;
  cholesky_upper(factor.data(), kBlock, pool);
  output.feedback = block_ldl_feedback(factor.data(), kBlock, pool);
  Exl3Tensor tensor;
  tensor.k = k;
  tensor.n = n;
  tensor.k2 = *k2;
  tensor.suh = scales.suh;
  tensor.svh = scales.svh;
  tensor.trellis.assign(static_cast<size_t>(trellis_words(k, n, *k2)), 0);
  ColumnProblem columns;
  columns.weight = w.data();
  columns.k = k;
  columns.n = n;
  columns.width = kBlock;
  columns.input = &input;
  columns.output = &output;
  columns.search.k2 = *k2;
  const double group = seconds("search with feedback, 128 columns, one thread", [&] { encode_columns(columns, tensor, one); });
  std::vector<float> tile(kTileSize);
  std::vector<uint16_t> states(kTileSize);
  for (size_t i = 0; i < tile.size(); ++i) tile[i] = static_cast<float>(2 * (rng.uniform(i) - 0.5));
  const int64_t n_tiles = k / kTile * (kBlock / kTile);
  seconds("  of which the search alone", [&] {
    for (int64_t t = 0; t < n_tiles; ++t) search_tile(tile.data(), columns.search, states.data());
  });
  const double all = group * static_cast<double>(n / kBlock) / pool.n_threads();
  std::printf("%-58s %8.2f s\n", "  all columns, all threads (projected)", all);
  total += all;
  std::unique_ptr<ErrorMetric> metric;
  total += seconds("Hessian times weight", [&] { metric = std::make_unique<ErrorMetric>(weight.data(), k, n, h.data(), OutputMetric(), best_simd_tier(), pool); });
  total += seconds("one round of refit", [&] { metric->refit_scales(0.025, 1, tensor, pool); });
  std::vector<float> decoded(weight.size());
  total += seconds("decode and measure, twice", [&] {
    for (int i = 0; i < 2; ++i) {
      decode_weight(tensor.view(), decoded.data(), pool);
      metric->measure(decoded.data(), pool);
    }
  });
  std::printf("%-58s %8.2f s, %.3f M weights/s\n", "sum", total, 1e-6 * static_cast<double>(k * n) / total);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return run(argc > 1 ? std::atof(argv[1]) : 3, argc > 3 ? std::atoll(argv[2]) : 5120, argc > 3 ? std::atoll(argv[3]) : 2304);
}
