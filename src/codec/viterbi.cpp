#include "codec/viterbi.h"

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <vector>

#include "base/check.h"
#include "codec/viterbi_cost.h"
#include "codec/viterbi_steps.h"

namespace espalier::codec {
namespace {

constexpr int kHalf = kTileSize / 2;

// 16-bit costs: the minimum is subtracted every so many steps. By then it may have used half of the range at most; beyond that,
// nodes that matter could have met the other end. Long enough that every node has been reached from a single start node.
constexpr int renormalise_period(int k2) { return k2 >= 10 ? 4 : 16; }
constexpr uint16_t kMostPerPeriod = 32768;

// Codes in state order (for the trace back) and in the order the steps read them: [0] at even positions, [1] at odd ones, which
// have a table of their own only at half-integer widths.
struct CodeTables {
  std::vector<int16_t> by_state16, ordered16[2];
  std::vector<float> ordered32[2];

  const int16_t* table16(int parity) const { return ordered16[ordered16[1].empty() ? 0 : parity].data(); }
  const float* table32(int parity) const { return ordered32[ordered32[1].empty() ? 0 : parity].data(); }
};

int16_t to_units(double x, int unit) {
  const double scaled = std::floor(x * unit + 0.5);
  return static_cast<int16_t>(scaled < -32767 ? -32767 : scaled > 32767 ? 32767 : scaled);
}

std::unique_ptr<CodeTables> make_code_tables(Codebook codebook, int k2, const StepKernels& kernels) {
  auto tables = std::make_unique<CodeTables>();
  const float* values = codebook_table_f32(codebook);
  const int unit = cost_unit(k2, codebook);
  tables->by_state16.resize(kNStates);
  for (int s = 0; s < kNStates; ++s) tables->by_state16[s] = to_units(values[s], unit);
  for (int parity = 0; parity <= k2 % 2; ++parity) {
    const int in_bits = step_bits(k2, parity);
    const int out_bits = step_bits(k2, parity + 1);
    std::vector<int16_t>& ordered16 = tables->ordered16[parity];
    std::vector<float>& ordered32 = tables->ordered32[parity];
    ordered16.resize(kNStates);
    ordered32.resize(kNStates);
    for (int s = 0; s < kNStates; ++s) {
      ordered16[table_index(s, in_bits, out_bits, kernels.lanes16)] = tables->by_state16[s];
      ordered32[table_index(s, in_bits, out_bits, kernels.lanes32)] = values[s];
    }
  }
  return tables;
}

const StepKernels& kernels_of(SimdTier tier) {
  switch (tier) {
#if defined(__x86_64__)
    case SimdTier::kAvx512: return step_kernels_avx512();
    case SimdTier::kAvx2: return step_kernels_avx2();
    case SimdTier::kBaseline: return step_kernels_sse4();
#endif
    default: return step_kernels_portable();
  }
}

const CodeTables& code_tables(Codebook codebook, int k2, SimdTier tier) {
  struct Slot {
    std::once_flag once;
    std::unique_ptr<CodeTables> tables;
  };
  static std::array<Slot, 4 * 3 * (kMaxK2 + 1)> slots;
  Slot& slot = slots[(static_cast<size_t>(tier) * 3 + static_cast<size_t>(codebook)) * (kMaxK2 + 1) + static_cast<size_t>(k2)];
  std::call_once(slot.once, [&] { slot.tables = make_code_tables(codebook, k2, kernels_of(tier)); });
  return *slot.tables;
}

// The two cost types, each with what a step, the start and the trace back need.
struct IntegerCosts {
  using T = uint16_t;
  using C = int16_t;
  static constexpr T kForbidden = 65535;
  const StepKernels& kernels;
  const CodeTables& tables;
  int k2;
  Codebook codebook;

  C target(float w) const { return to_units(w, cost_unit(k2, codebook)); }
  C code(int state) const { return tables.by_state16[static_cast<size_t>(state)]; }
  void step(int parity, const T* prev, T* next, C w) const { kernels.step16[k2][parity](prev, next, tables.table16(parity), w); }
  T cost(T prev, int state, C w) const { return saturating_add(prev, integer_error(cost_rule(k2), code(state), w)); }
  bool is_exact(int state, C w) const { return !is_inexact(cost_rule(k2), code(state), w) && w > -32767 && w < 32767; }
  bool renormalise(T* costs, int size) const { return kernels.subtract_minimum16(costs, size) <= kMostPerPeriod; }
};

struct FloatCosts {
  using T = float;
  using C = float;
  static constexpr T kForbidden = std::numeric_limits<float>::infinity();
  const StepKernels& kernels;
  const CodeTables& tables;
  int k2;
  Codebook codebook;

  C target(float w) const { return w; }
  C code(int state) const { return codebook_table_f32(codebook)[state]; }
  void step(int parity, const T* prev, T* next, C w) const { kernels.step32[k2][parity](prev, next, tables.table32(parity), w); }
  T cost(T prev, int state, C w) const { return prev + float_error(code(state), w); }
  bool is_exact(int, C) const { return true; }
  bool renormalise(T*, int) const { return true; }
};

// Per-thread memory of cost vectors, 64-byte aligned, grown on demand and reused by every tile.
template <typename T>
T* scratch(size_t n_rows, size_t n_nodes) {
  thread_local std::vector<T> storage;
  const size_t wanted = n_rows * n_nodes + 64 / sizeof(T);
  if (storage.size() < wanted) storage.resize(wanted);
  const uintptr_t address = reinterpret_cast<uintptr_t>(storage.data());
  return reinterpret_cast<T*>((address + 63) / 64 * 64);
}

// Only every segment_steps-th cost vector is kept; the trace back computes the few numbers in between again. This keeps the
// vectors of a tile near the cache (2 MiB instead of 16 at K = 1). Divides kTileSize, kHalf and the renormalising period, and is
// even at half-integer widths, so that every segment begins at an even position.
constexpr int segment_steps(int k2) { return k2 == 2 ? 8 : k2 <= 4 ? 4 : k2 <= 7 ? 2 : 1; }
constexpr int kMostPaths = 256;  // the nodes from which a segment can reach a given node: 2^(K * segment_steps) at most

// The best path through one segment that ends in out-node `end`: `before` are the costs in front of its first step, w [steps] its
// targets. Writes its states [steps] and returns the node it starts from. Going one step back from a node drops the bits that the
// step took in from its low end and puts as many free bits on top as the next step takes in, so the search is a small tree: after
// `depth` steps back a node is (upper, end without its lower bits) with `free_bits` bits in upper.
template <typename Costs>
int trace_segment(const Costs& costs, const typename Costs::T* before, int end, const typename Costs::C* w, int steps,
                  uint16_t* states) {
  using T = typename Costs::T;
  const auto bits_at = [&](int depth) { return step_bits(costs.k2, steps - depth); };  // of the step behind the node at `depth`
  int free_bits[9] = {};
  int dropped_bits[9] = {};
  for (int depth = 0; depth < steps; ++depth) {
    free_bits[depth + 1] = free_bits[depth] + bits_at(depth);
    dropped_bits[depth + 1] = dropped_bits[depth] + bits_at(depth + 1);
  }
  const auto node_of = [&](int depth, int upper) {
    const int node_bits = 16 - bits_at(depth);
    return (upper << (node_bits - free_bits[depth])) | (end >> dropped_bits[depth]);
  };
  T cost[kMostPaths];
  uint8_t winner[8][kMostPaths];  // by depth of the out-node, 0 = the end
  for (int u = 0; u < (1 << free_bits[steps]); ++u) cost[u] = before[node_of(steps, u)];
  for (int depth = steps - 1; depth >= 0; --depth) {  // the step into nodes `depth` steps before the end; in place, q = 0 first
    const int n_upper = 1 << free_bits[depth];
    const int n_branches = 1 << bits_at(depth);
    const int node_bits = 16 - bits_at(depth);
    const typename Costs::C target = w[steps - 1 - depth];
    for (int u = 0; u < n_upper; ++u) {
      const int node = node_of(depth, u);
      T least = costs.cost(cost[u], node, target);
      uint8_t best = 0;
      for (int q = 1; q < n_branches; ++q) {
        const T candidate = costs.cost(cost[q * n_upper + u], (q << node_bits) | node, target);
        if (candidate < least) {
          least = candidate;
          best = static_cast<uint8_t>(q);
        }
      }
      cost[u] = least;
      winner[depth][u] = best;
    }
  }
  int upper = 0;
  for (int depth = 0; depth < steps; ++depth) {
    const int q = winner[depth][upper];
    states[steps - 1 - depth] = static_cast<uint16_t>((q << (16 - bits_at(depth))) | node_of(depth, upper));
    upper |= q << free_bits[depth];
  }
  return node_of(steps, upper);
}

// Returns false when integer costs met a limit on the path, or the ring did not close.
template <typename Costs>
bool search(const Costs& costs, const float* tile, uint16_t* states) {
  using T = typename Costs::T;
  using C = typename Costs::C;
  const int k2 = costs.k2;
  const int period = renormalise_period(k2);
  const int segment = segment_steps(k2);
  const int n_nodes = 65536 >> step_bits(k2, 0);  // before even positions; at half-integer widths half as many before odd ones
  const size_t row = static_cast<size_t>(n_nodes);
  T* const work = scratch<T>(static_cast<size_t>(2 + kTileSize / segment), row);  // two rows in turn, then the kept ones
  T* const kept = work + 2 * row;                                                // kept[s]: costs before segment s
  C w[kTileSize];
  for (int p = 0; p < kTileSize; ++p) w[p] = costs.target(tile[p]);

  // Pass 1: free start at position 128, on through 255 and 0, to 127. Only positions 0..127 are traced back.
  std::memset(work, 0, row * sizeof(T));
  const T* prev = work;
  for (int i = 0; i < kTileSize; ++i) {
    const int done = i + 1 - kHalf;  // steps beyond position 255
    T* next = done >= 0 && done < kHalf && done % segment == 0 ? kept + static_cast<size_t>(done / segment) * row
              : prev == work                                  ? work + row
                                                              : work;
    costs.step(i & 1, prev, next, w[(i + kHalf) % kTileSize]);
    if (i % period == period - 1 && !costs.renormalise(next, n_nodes)) return false;
    prev = next;
  }
  int node = 0;
  for (int e = 1; e < n_nodes; ++e) {
    if (prev[e] < prev[node]) node = e;
  }
  for (int s = kHalf / segment - 1; s >= 0; --s) {
    node = trace_segment(costs, kept + static_cast<size_t>(s) * row, node, w + s * segment, segment, states);
  }
  const int boundary = node;

  // Pass 2: from the boundary node back to it. The last segment needs no vectors: its end is known.
  for (int e = 0; e < n_nodes; ++e) kept[e] = Costs::kForbidden;
  kept[boundary] = 0;
  prev = kept;
  for (int p = 0; p < kTileSize - segment; ++p) {
    T* next = (p + 1) % segment == 0 ? kept + static_cast<size_t>((p + 1) / segment) * row : prev == work ? work + row : work;
    costs.step(p & 1, prev, next, w[p]);
    if (p % period == period - 1 && !costs.renormalise(next, n_nodes)) return false;
    prev = next;
  }
  for (int s = kTileSize / segment - 1; s >= 0; --s) {
    node = trace_segment(costs, kept + static_cast<size_t>(s) * row, node, w + s * segment, segment, states + s * segment);
  }
  for (int p = 0; p < kTileSize; ++p) {
    if (!costs.is_exact(states[p], w[p])) return false;
  }
  return node == boundary;
}

void search_one_cut(const float* tile, const SearchOptions& options, uint16_t* states) {
  const StepKernels& kernels = kernels_of(options.tier);
  const CodeTables& tables = code_tables(options.codebook, options.k2, options.tier);
  if (options.costs == CostKind::kAuto &&
      search(IntegerCosts{kernels, tables, options.k2, options.codebook}, tile, states)) {
    return;
  }
  const bool closed = search(FloatCosts{kernels, tables, options.k2, options.codebook}, tile, states);
  CHECK(closed) << "trellis search left a ring open";
}

}  // namespace

void search_tile(const float* tile, const SearchOptions& options, uint16_t* states) {
  CHECK(is_searchable_width(options.k2, options.codebook))
      << "width " << options.k2 << "/2 with codebook " << codebook_name(options.codebook);
  CHECK(options.n_cuts == 1 || options.n_cuts == 2 || options.n_cuts == 4) << options.n_cuts << " cuts";
  for (int p = 0; p < kTileSize; ++p) CHECK(std::fabs(tile[p]) < 1e15f) << "target " << p << " is " << tile[p];
  search_one_cut(tile, options, states);
  if (options.n_cuts == 1) return;
  double least = tile_error(tile, states, options.codebook);
  for (int cut = 1; cut < options.n_cuts; ++cut) {
    const int shift = cut * kTileSize / options.n_cuts;  // even: the widths of steps alternate at half-integer K
    float rotated[kTileSize];
    uint16_t found[kTileSize];
    for (int p = 0; p < kTileSize; ++p) rotated[p] = tile[(p + shift) % kTileSize];
    search_one_cut(rotated, options, found);
    uint16_t back[kTileSize];
    for (int p = 0; p < kTileSize; ++p) back[(p + shift) % kTileSize] = found[p];
    const double error = tile_error(tile, back, options.codebook);
    if (error < least) {
      least = error;
      std::memcpy(states, back, sizeof back);
    }
  }
}

void search_tiles(ThreadPool& pool, const float* tiles, int64_t n_tiles, const SearchOptions& options, uint16_t* states) {
  pool.parallel_for(n_tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) search_tile(tiles + t * kTileSize, options, states + t * kTileSize);
  });
}

double tile_error(const float* tile, const uint16_t* states, Codebook codebook) {
  const float* values = codebook_table_f32(codebook);
  double sum = 0;
  for (int p = 0; p < kTileSize; ++p) {
    const double d = double{values[states[p]]} - double{tile[p]};
    sum += d * d;
  }
  return sum;
}

}  // namespace espalier::codec
