// How many weights a second does one core multiply with packed mul1 matrices, and how fast is the trellis encoder?
//
// Method: int8_matmul on one thread, the whole call (rotations and quantization included), random trellis bits and
// activations. Set `memory`: 5120x2304 matrices visited in turn, at least --memory-mb of them together; set `cache`:
// one 1024x1024 matrix. Every figure is the least of many short repetitions; calls of one cell are spread over the
// whole run. Clock: a chain of dependent 64-bit multiplications, 3 cycles each on the cores we know. Floors: reading
// the trellis bytes at the measured rate of plain reads; vector operations of the kernel for Intel's cores (5 + 2m per 32
// weights with bytes, 8 + m with words) at two a cycle. Usage: bench_exl3_cpu [--raw] [--rounds N] [--memory-mb N] [--no-encoder] [--tier NAME]
// [K...]; K such as 2 or 2.5. bench/exl3_cpu.py runs it next to llama.cpp's kernels.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "base/rng.h"
#include "codec/int8_matmul.h"
#include "codec/matmul.h"
#include "codec/viterbi.h"
#include "codec/weight_scales.h"
#include "tensor/float_formats.h"

namespace {

using namespace espalier;
using namespace espalier::codec;

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::string machine_name() {
  std::ifstream info("/proc/cpuinfo");
  std::string line;
  while (std::getline(info, line)) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown CPU";
}

double clock_hz() {
  double least = 1e30;
  volatile uint64_t sink = 3;
  for (int repeat = 0; repeat < 50; ++repeat) {
    uint64_t x = sink;
    const auto start = Clock::now();
    for (int i = 0; i < 20000; ++i) x *= x;
    least = std::min(least, seconds_since(start));
    sink = x | 3;
  }
  return 3 * 20000 / least;
}

// Bytes a second of plain reads on one thread: the fastest 2 MiB of passes over 256 MiB.
double read_rate() {
  const size_t piece = (size_t{2} << 20) / 8;
  std::vector<uint64_t> data(128 * piece, 1);
  volatile uint64_t sink = 0;
  double least = 1e30;
  for (int repeat = 0; repeat < 5; ++repeat) {
    for (size_t first = 0; first < data.size(); first += piece) {
      const auto start = Clock::now();
      uint64_t sums[8] = {};
      for (size_t i = first; i < first + piece; i += 8) {
        for (size_t j = 0; j < 8; ++j) sums[j] += data[i + j];
      }
      least = std::min(least, seconds_since(start));
      sink = sink + sums[0] + sums[7];
    }
  }
  return static_cast<double>(8 * piece) / least;
}

Exl3Tensor random_tensor(int64_t k, int64_t n, int k2, uint64_t seed) {
  Exl3Tensor t;
  t.k = k;
  t.n = n;
  t.k2 = k2;
  t.trellis.resize(static_cast<size_t>(trellis_words(k, n, k2)));
  const CounterRng rng(seed, "trellis");
  for (size_t i = 0; i + 4 <= t.trellis.size(); i += 4) {
    const uint64_t bits = rng.bits(i);
    std::memcpy(&t.trellis[i], &bits, sizeof bits);
  }
  t.suh.assign(static_cast<size_t>(k), encode_f16(0.01f));
  t.svh.assign(static_cast<size_t>(n), encode_f16(1));
  return t;
}

enum class Kind { kPlain, kResidual, kExact };
constexpr const char* kKindNames[] = {"plain", "residual", "exact"};

struct Cell {
  Kind kind;
  int rows;
  double least = 1e30;  // seconds a matrix
};

struct Case {
  std::vector<Exl3Tensor> tensors;
  std::vector<Cell> cells;
  size_t next = 0;

  Case(int64_t k, int64_t n, int k2, int64_t bytes, bool with_exact) {
    const int64_t each = 2 * trellis_words(k, n, k2);
    for (int64_t i = 0; i < std::max<int64_t>(1, (bytes + each - 1) / each); ++i) {
      tensors.push_back(random_tensor(k, n, k2, static_cast<uint64_t>(i)));
    }
    for (Kind kind : {Kind::kPlain, Kind::kResidual}) {
      for (int rows : {1, 2, 4, 8, 16}) cells.push_back({kind, rows});
    }
    if (with_exact) cells.push_back({Kind::kExact, 1});
  }

  // One round: each cell `calls` times, each call on the next matrix.
  void round(ThreadPool& pool, SimdTier tier, int calls, const std::vector<float>& x, std::vector<float>& y) {
    for (Cell& cell : cells) {
      for (int c = 0; c < calls; ++c) {
        const Exl3View view = tensors[next++ % tensors.size()].view();
        const auto start = Clock::now();
        if (cell.kind == Kind::kExact) {
          exl3_matmul(pool, view, x.data(), cell.rows, y.data(), tier);
        } else {
          const Int8Mode mode = cell.kind == Kind::kPlain ? Int8Mode::kPlain : Int8Mode::kResidual;
          int8_matmul(pool, view, x.data(), cell.rows, y.data(), mode, tier);
        }
        cell.least = std::min(cell.least, seconds_since(start));
      }
    }
  }
};

double gaussian(const CounterRng& rng, uint64_t i) {
  return std::sqrt(-2 * std::log(1 - rng.uniform(2 * i))) * std::cos(6.283185307179586 * rng.uniform(2 * i + 1));
}

// Seconds per million weights of the search alone, one core.
double encoder_seconds(ThreadPool& pool, int k2, SimdTier tier) {
  const int64_t n_tiles = 16;
  const CounterRng rng(1, "tiles");
  const double spread = best_spread(Codebook::kMul1, k2);
  std::vector<float> tiles(static_cast<size_t>(n_tiles * kTileSize));
  for (size_t i = 0; i < tiles.size(); ++i) tiles[i] = static_cast<float>(gaussian(rng, i) * spread);
  std::vector<uint16_t> states(tiles.size());
  SearchOptions options;
  options.k2 = k2;
  options.tier = tier;
  double least = 1e30;
  for (int repeat = 0; repeat < 7; ++repeat) {
    const auto start = Clock::now();
    search_tiles(pool, tiles.data(), n_tiles, options, states.data());
    least = std::min(least, seconds_since(start));
  }
  return least / static_cast<double>(n_tiles * kTileSize) * 1e6;
}

struct Options {
  bool raw = false;
  bool encoder = true;
  int rounds = 40;
  int64_t memory_bytes = int64_t{96} << 20;
  SimdTier tier = best_simd_tier();
  std::vector<int> widths;
};

bool parse(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--raw") {
      options.raw = true;
    } else if (arg == "--no-encoder") {
      options.encoder = false;
    } else if (arg == "--rounds" && i + 1 < argc) {
      options.rounds = std::max(1, std::atoi(argv[++i]));
    } else if (arg == "--memory-mb" && i + 1 < argc) {
      options.memory_bytes = static_cast<int64_t>(std::max(1, std::atoi(argv[++i]))) << 20;
    } else if (arg == "--tier" && i + 1 < argc) {
      const std::string name = argv[++i];
      bool found = false;
      for (SimdTier tier : usable_simd_tiers()) {
        if (simd_tier_name(tier) == name) {
          options.tier = tier;
          found = true;
        }
      }
      if (!found) return false;
    } else {
      const Result<int> k2 = width_from_bits(std::atof(arg.c_str()));
      if (!k2.ok()) return false;
      options.widths.push_back(*k2);
    }
  }
  if (options.widths.empty()) options.widths = {3, 4, 5, 6, 7, 8, 10, 12};
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (!parse(argc, argv, options)) {
    std::fprintf(stderr, "usage: %s [--raw] [--rounds N] [--memory-mb N] [--no-encoder] [--tier NAME] [K...]\n",
                 argv[0]);
    return 2;
  }
  ThreadPool pool(1);
  const double hz = clock_hz();
  const double read = read_rate();
  const std::string tier(simd_tier_name(options.tier));
  if (options.raw) {
    std::printf("machine\t%s\t%s\t%.4g\t%.4g\n", machine_name().c_str(), tier.c_str(), hz, read);
  } else {
    std::printf("%s, tier %s, one thread, clock %.2f GHz, plain reads %.1f GB/s\n", machine_name().c_str(),
                tier.c_str(), hz * 1e-9, read * 1e-9);
  }
  const CounterRng rng(5, "activations");
  std::vector<float> x(16 * 5120), y(16 * 2304);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(gaussian(rng, i));
  for (int k2 : options.widths) {
    struct Set {
      const char* name;
      int64_t k, n, bytes;
      int calls;
    };
    for (const Set& set : {Set{"memory", 5120, 2304, options.memory_bytes, 1}, Set{"cache", 1024, 1024, 1, 6}}) {
      Case c(set.k, set.n, k2, set.bytes, k2 == 6);
      for (int round = 0; round < options.rounds; ++round) c.round(pool, options.tier, set.calls, x, y);
      const double weights = static_cast<double>(set.k * set.n);
      for (const Cell& cell : c.cells) {
        const bool as_bytes = cell.kind == Kind::kPlain && cell.rows <= 2;
        const double operations = as_bytes ? 5 + 2 * cell.rows : 8 + cell.rows;
        const double floor_operations = weights / 32 * operations / 2 / hz;
        const double floor_bytes = weights * k2 / 16 / read;
        std::printf(options.raw ? "ours\t%s\t%s\t%s\t%d\t%.6g\t%.6g\t%.6g\n"
                                : "K=%-4s %-7s %-9s m=%-3d %6.2f Gw/s  floors: operations %6.2f, bytes %6.2f\n",
                    width_text(k2).c_str(), set.name, kKindNames[static_cast<int>(cell.kind)], cell.rows,
                    1e-9 * weights / cell.least, 1e-9 * weights / floor_operations, 1e-9 * weights / floor_bytes);
        if (!options.raw && cell.rows == 1)
          std::printf("       %.2f cycles per 16 weights\n", cell.least * hz / (weights / 16));
      }
    }
    if (options.encoder && is_searchable_width(k2)) {
      std::printf(options.raw ? "encoder\t%s\t%.6g\n" : "K=%-4s encoder %.3f s per million weights\n",
                  width_text(k2).c_str(), encoder_seconds(pool, k2, options.tier));
    }
    std::fflush(stdout);
  }
  return 0;
}
