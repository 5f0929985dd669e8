#include "codec/viterbi.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "base/check.h"
#include "codec/viterbi_cost.h"
#include "codec/viterbi_tables.h"

namespace espalier::codec {
namespace {

constexpr int kHalf = kTileSize / 2;

// 16-bit costs: the minimum is subtracted every so many steps. By then it may have used half of the range at most; beyond that,
// nodes that matter could have met the other end. Long enough that every node has been reached from a single start node.
constexpr int renormalise_period(int k2) { return k2 >= 10 ? 4 : 16; }
constexpr uint16_t kMostPerPeriod = 32768;

// Only every segment_steps-th cost vector is kept; the trace back computes the few numbers in between again. This keeps the
// vectors of a tile near the cache (2 MiB instead of 16 at K = 1). Divides kTileSize, kHalf and the renormalising period, and is
// even at half-integer widths, so that every segment begins at an even position.
constexpr int segment_steps(int k2) { return k2 == 2 ? 8 : k2 <= 4 ? 4 : k2 <= 7 ? 2 : 1; }

// The two cost types, each with what a step, the start and the trace back need.
template <int kWidth>
struct IntegerCosts {
  using T = uint16_t;
  using C = int16_t;
  static constexpr int k2 = kWidth;
  static constexpr CostRule kRule = cost_rule(k2);
  static constexpr T kForbidden = 65535;
  const StepKernels& kernels;
  const CodeTables& tables;
  const int16_t* codes;
  int unit;

  IntegerCosts(const CodeTables& t, Codebook codebook)
      : kernels(*t.kernels), tables(t), codes(t.by_state16.data()), unit(cost_unit(k2, codebook)) {}

  C target(float w) const { return to_cost_units(w, unit); }
  void step(int position, const T* prev, T* next, C w) const {
    constexpr int kMask = k2 % 2;
    kernels.step16[k2][position & kMask](prev, next, tables.ordered16[position & kMask].data(), w);
  }
  T cost(T prev, int state, C w) const { return saturating_add(prev, integer_error(kRule, codes[state], w)); }
  // The least cost of an out-node's states and its branch, the smallest if several have it; prev[q * stride] is the cost before q.
  template <int kOutBits>
  std::pair<T, uint8_t> best_branch(int position, const T* prev, int stride, int node, C w) const {
    const C* codes_of_node = tables.by_node16[position & (k2 % 2)].data() + (node << kOutBits);
    uint32_t best = ~0u;
    for (uint32_t q = 0; q < 1u << kOutBits; ++q) {
      const uint32_t c = saturating_add(prev[q * stride], integer_error(kRule, codes_of_node[q], w));
      best = std::min(best, c << 8 | q);
    }
    return {static_cast<T>(best >> 8), static_cast<uint8_t>(best)};
  }
  bool is_exact(int state, C w) const { return !is_inexact(kRule, codes[state], w) && w > -32767 && w < 32767; }
  bool renormalise(T* costs, int size) const { return kernels.subtract_minimum16(costs, size) <= kMostPerPeriod; }
  int first_least(const T* costs, int) const {  // just renormalised
    int node = 0;
    while (costs[node] != 0) ++node;
    return node;
  }
};

template <int kWidth>
struct FloatCosts {
  using T = float;
  using C = float;
  static constexpr int k2 = kWidth;
  static constexpr T kForbidden = std::numeric_limits<float>::infinity();
  const StepKernels& kernels;
  const CodeTables& tables;
  const float* codes;

  FloatCosts(const CodeTables& t, Codebook codebook) : kernels(*t.kernels), tables(t), codes(codebook_table_f32(codebook)) {}

  C target(float w) const { return w; }
  void step(int position, const T* prev, T* next, C w) const {
    constexpr int kMask = k2 % 2;
    kernels.step32[k2][position & kMask](prev, next, tables.ordered32[position & kMask].data(), w);
  }
  T cost(T prev, int state, C w) const { return prev + float_error(codes[state], w); }
  template <int kOutBits>
  std::pair<T, uint8_t> best_branch(int, const T* prev, int stride, int node, C w) const {
    std::pair<T, uint8_t> best{cost(prev[0], node, w), 0};
    for (int q = 1; q < 1 << kOutBits; ++q) {
      const T c = cost(prev[q * stride], (q << (16 - kOutBits)) | node, w);
      if (c < best.first) best = {c, static_cast<uint8_t>(q)};
    }
    return best;
  }
  bool is_exact(int, C) const { return true; }
  bool renormalise(T*, int) const { return true; }
  int first_least(const T* costs, int size) const {
    int node = 0;
    for (int e = 1; e < size; ++e) node = costs[e] < costs[node] ? e : node;
    return node;
  }
};

// Per-thread memory of cost vectors, grown on demand and reused by every tile.
template <typename T>
T* scratch(size_t size) {
  thread_local AlignedArray<T> storage;
  if (storage.capacity() < size) storage = AlignedArray<T>(size);
  return storage.data();
}

// The best path through one segment that ends in out-node `end`: `before` are the costs in front of its first step, w [steps] its
// targets. Writes its states [steps] and returns the node it starts from. Going one step back from a node drops the bits that the
// step took in from its low end and puts as many free bits on top as the next step takes in, so the search is a small tree: after
// `depth` steps back a node is (upper, end without its lower bits) with free_bits(depth) bits in upper.
template <typename Costs>
int trace_segment(const Costs& costs, const typename Costs::T* before, int end, const typename Costs::C* w, uint16_t* states) {
  using T = typename Costs::T;
  constexpr int kSteps = segment_steps(Costs::k2);
  constexpr auto window = [](int from, int to) {  // bits that the steps from .. to-1 take in
    int bits = 0;
    for (int step = from; step < to; ++step) bits += step_bits(Costs::k2, step);
    return bits;
  };
  constexpr auto free_bits = [=](int depth) { return window(kSteps - depth + 1, kSteps + 1); };
  constexpr auto dropped_bits = [=](int depth) { return window(kSteps - depth, kSteps); };
  constexpr auto node_bits = [](int depth) { return 16 - step_bits(Costs::k2, kSteps - depth); };
  const auto node_of = [=](int depth, int upper) {
    return (upper << (node_bits(depth) - free_bits(depth))) | (end >> dropped_bits(depth));
  };
  T cost[1 << free_bits(kSteps)];
  uint8_t winner[kSteps][1 << free_bits(kSteps - 1)];  // by depth of the out-node, 0 = the end
  for (int u = 0; u < (1 << free_bits(kSteps)); ++u) cost[u] = before[node_of(kSteps, u)];
  const auto step_into = [&]<int depth>(std::integral_constant<int, depth>) {  // into nodes `depth` steps before the end; in place
    constexpr int kStep = kSteps - 1 - depth;
    constexpr int kOutBits = step_bits(Costs::k2, kStep + 1);
    constexpr int kUpper = 1 << free_bits(depth);
    for (int u = 0; u < kUpper; ++u) {
      const auto [least, q] = costs.template best_branch<kOutBits>(kStep, cost + u, kUpper, node_of(depth, u), w[kStep]);
      winner[depth][u] = q;
      cost[u] = least;
    }
  };
  [&]<int... depth>(std::integer_sequence<int, depth...>) {
    (step_into(std::integral_constant<int, kSteps - 1 - depth>()), ...);
  }(std::make_integer_sequence<int, kSteps>());
  int upper = 0;
  for (int depth = 0; depth < kSteps; ++depth) {
    const int q = winner[depth][upper];
    states[kSteps - 1 - depth] = static_cast<uint16_t>((q << node_bits(depth)) | node_of(depth, upper));
    upper |= q << free_bits(depth);
  }
  return node_of(kSteps, upper);
}

constexpr int kFewNodes = 1024;

// The first steps from a single start node reach few nodes, each by one way, and consecutive ones. One such step from the nodes
// first .. first + n - 1 of prev; the rest of next is forbidden. Returns the first node reached.
template <typename Costs>
int step_from_few(const Costs& costs, int position, const typename Costs::T* prev, typename Costs::T* next, int first, int n,
                  typename Costs::C w) {
  const int in_bits = step_bits(Costs::k2, position);
  const int n_nodes = 65536 >> step_bits(Costs::k2, position + 1);
  for (int e = 0; e < n_nodes; ++e) next[e] = Costs::kForbidden;
  const int reached = (first << in_bits) & (n_nodes - 1);
  for (int i = 0; i < n << in_bits; ++i) next[reached + i] = costs.cost(prev[first + (i >> in_bits)], (first << in_bits) + i, w);
  return reached;
}

// Returns false when integer costs met a limit on the path, or the ring did not close.
template <typename Costs>
bool search(const Costs& costs, const float* tile, uint16_t* states) {
  using T = typename Costs::T;
  using C = typename Costs::C;
  constexpr int k2 = Costs::k2;
  constexpr int kPeriod = renormalise_period(k2);
  constexpr int kSegment = segment_steps(k2);
  constexpr int kNodes = 65536 >> step_bits(k2, 0);  // before even positions; at half-integer widths half as many before odd ones
  constexpr size_t kRow = kNodes;
  T* const work = scratch<T>((2 + kTileSize / kSegment) * kRow);  // two rows in turn, then the kept ones
  T* const kept = work + 2 * kRow;                                // kept[s]: costs before segment s
  const auto other = [&](const T* row) { return row == work ? work + kRow : work; };
  C w[kTileSize];
  for (int p = 0; p < kTileSize; ++p) w[p] = costs.target(tile[p]);

  // Pass 1: free start at position 128, on through 255 and 0, to 127. Only positions 0..127 are traced back.
  std::memset(work, 0, kRow * sizeof(T));
  const T* prev = work;
  for (int i = 0; i < kTileSize; ++i) {
    const int done = i + 1 - kHalf;  // steps beyond position 255
    T* next = done >= 0 && done < kHalf && done % kSegment == 0 ? kept + static_cast<size_t>(done / kSegment) * kRow : other(prev);
    costs.step(i, prev, next, w[(i + kHalf) % kTileSize]);
    if (i % kPeriod == kPeriod - 1 && !costs.renormalise(next, kNodes)) return false;
    prev = next;
  }
  int node = costs.first_least(prev, kNodes);
  for (int s = kHalf / kSegment - 1; s >= 0; --s) {
    node = trace_segment(costs, kept + static_cast<size_t>(s) * kRow, node, w + s * kSegment, states + s * kSegment);
  }
  const int boundary = node;

  // Pass 2: from the boundary node back to it. The last segment needs no vectors: its end is known.
  for (int e = 0; e < kNodes; ++e) kept[e] = Costs::kForbidden;
  kept[boundary] = 0;
  prev = kept;
  int first = boundary;
  int n_reached = 1;
  for (int p = 0; p < kTileSize - kSegment; ++p) {
    T* next = (p + 1) % kSegment == 0 ? kept + static_cast<size_t>((p + 1) / kSegment) * kRow : other(prev);
    if (n_reached << step_bits(k2, p) <= kFewNodes) {
      first = step_from_few(costs, p, prev, next, first, n_reached, w[p]);
      n_reached <<= step_bits(k2, p);
    } else {
      n_reached = kFewNodes;
      costs.step(p, prev, next, w[p]);
    }
    if (p % kPeriod == kPeriod - 1 && !costs.renormalise(next, kNodes)) return false;
    prev = next;
  }
  for (int s = kTileSize / kSegment - 1; s >= 0; --s) {
    node = trace_segment(costs, kept + static_cast<size_t>(s) * kRow, node, w + s * kSegment, states + s * kSegment);
  }
  for (int p = 0; p < kTileSize; ++p) {
    if (!costs.is_exact(states[p], w[p])) return false;
  }
  return node == boundary;
}

template <int k2>
void search_at_width(const float* tile, const SearchOptions& options, uint16_t* states) {
  const CodeTables& tables = code_tables(options.codebook, k2, options.tier);
  if (options.costs == CostKind::kAuto && search(IntegerCosts<k2>(tables, options.codebook), tile, states)) return;
  const bool closed = search(FloatCosts<k2>(tables, options.codebook), tile, states);
  CHECK(closed) << "trellis search left a ring open";
}

void search_one_cut(const float* tile, const SearchOptions& options, uint16_t* states) {
  switch (options.k2) {
    case 2: return search_at_width<2>(tile, options, states);
    case 3: return search_at_width<3>(tile, options, states);
    case 4: return search_at_width<4>(tile, options, states);
    case 5: return search_at_width<5>(tile, options, states);
    case 6: return search_at_width<6>(tile, options, states);
    case 7: return search_at_width<7>(tile, options, states);
    case 8: return search_at_width<8>(tile, options, states);
    case 10: return search_at_width<10>(tile, options, states);
    case 12: return search_at_width<12>(tile, options, states);
    case 14: return search_at_width<14>(tile, options, states);
    case 16: return search_at_width<16>(tile, options, states);
    default: CHECK(false) << "width " << options.k2 << "/2";
  }
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
