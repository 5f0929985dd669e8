// How long does the trellis search take per tile, and a whole matrix per million weights?
//
// Method: 64 Gaussian tiles (8 for the portable tier) on one thread, CPU time of the thread, the least of five repetitions; then
// quantize_matrix on a 256x512 matrix with a Hessian of 512 rows, wall time with all threads.
// Usage: bench_exl3_encode [K...]; default 1 to 8.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <string>
#include <vector>

#include "base/rng.h"
#include "codec/quantizer.h"
#include "codec/viterbi.h"
#include "codec/weight_scales.h"

namespace {

using namespace espalier;
using namespace espalier::codec;

std::string machine_name() {
  std::ifstream info("/proc/cpuinfo");
  std::string line;
  while (std::getline(info, line)) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown CPU";
}

double thread_seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

double gaussian(const CounterRng& rng, uint64_t i) {
  return std::sqrt(-2 * std::log(1 - rng.uniform(2 * i))) * std::cos(6.283185307179586 * rng.uniform(2 * i + 1));
}

void bench_tiles(int width, SimdTier tier, CostKind costs) {
  const int n_tiles = tier == SimdTier::kReference ? 8 : 64;
  const CounterRng rng(1, "tiles");
  const double spread = best_spread(Codebook::kMul1, 2 * width);
  std::vector<float> tiles(static_cast<size_t>(n_tiles * kTileSize));
  for (size_t i = 0; i < tiles.size(); ++i) tiles[i] = static_cast<float>(gaussian(rng, i) * spread);
  std::vector<uint16_t> states(tiles.size());
  SearchOptions options;
  options.k2 = 2 * width;
  options.tier = tier;
  options.costs = costs;
  double least = 1e30;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const double start = thread_seconds();
    for (int t = 0; t < n_tiles; ++t) search_tile(tiles.data() + t * kTileSize, options, states.data() + t * kTileSize);
    least = std::min(least, thread_seconds() - start);
  }
  double error = 0;
  double power = 0;
  for (int t = 0; t < n_tiles; ++t) error += tile_error(tiles.data() + t * kTileSize, states.data() + t * kTileSize, options.codebook);
  for (float v : tiles) power += double{v} * double{v};
  std::printf("K=%d  %-8s  %-5s  %7.3f ms/tile  %6.3f M weights/s and core  relative mse %.6f\n", width,
              std::string(simd_tier_name(tier)).c_str(), costs == CostKind::kAuto ? "int16" : "fp32", 1e3 * least / n_tiles,
              1e-6 * n_tiles * kTileSize / least, error / power);
}

void bench_matrix(int width, ThreadPool& pool) {
  const int64_t k = 256, n = 512, rows = 512;
  const CounterRng rng(2, "matrix");
  std::vector<float> weight(static_cast<size_t>(k * n));
  for (size_t i = 0; i < weight.size(); ++i) weight[i] = static_cast<float>(0.02 * gaussian(rng, i));
  std::vector<double> x(static_cast<size_t>(rows * k)), hessian(static_cast<size_t>(k * k));
  for (size_t i = 0; i < x.size(); ++i) x[i] = gaussian(rng, 1000000 + i);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < k; ++i) {
      for (int64_t j = 0; j < k; ++j) hessian[static_cast<size_t>(i * k + j)] += x[static_cast<size_t>(r * k + i)] * x[static_cast<size_t>(r * k + j)];
    }
  }
  QuantizeOptions options;
  options.k2 = 2 * width;
  const auto start = std::chrono::steady_clock::now();
  const Result<QuantizedMatrix> result = quantize_matrix(weight.data(), k, n, hessian.data(), options, pool);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::printf("K=%d  matrix %ldx%ld, %d threads: %.3f s, %.3f M weights/s, true error %.6f\n", width, static_cast<long>(k),
              static_cast<long>(n), pool.n_threads(), seconds, 1e-6 * static_cast<double>(k * n) / seconds, result.value().true_error);
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<int> widths;
  for (int i = 1; i < argc; ++i) {
    const int width = std::atoi(argv[i]);
    if (width < 1 || width > 8) {
      std::fprintf(stderr, "usage: %s [K...] with K from 1 to 8\n", argv[0]);
      return 2;
    }
    widths.push_back(width);
  }
  if (widths.empty()) widths = {1, 2, 3, 4, 5, 6, 7, 8};
  ThreadPool pool;
  std::printf("%s, best tier %s, mul1, Gaussian tiles at their best spread\n", machine_name().c_str(),
              std::string(simd_tier_name(best_simd_tier())).c_str());
  for (int width : widths) {
    for (SimdTier tier : usable_simd_tiers()) bench_tiles(width, tier, CostKind::kAuto);
    bench_tiles(width, best_simd_tier(), CostKind::kFloat);
    bench_matrix(width, pool);
  }
  return 0;
}
