// The way back: from kept cost vectors to states, by one warp. Internal to the GPU search.
//
// Between two kept vectors the few numbers that matter are computed again: `depth` steps back from a node there are
// nodes (upper, end without its lower bits), as in codec/viterbi.cpp. All loads of a segment are started before the
// first is used: their latency is what this costs.
#pragma once

#include "codec/cuda/viterbi_costs.cuh"
#include "codec/cuda/viterbi_variant.h"
#include "codec/trellis.h"

namespace espalier::codec::cuda {

// The tree of one segment. Depth 0 is the node at its end; branch i of a depth goes from the i-th node one step deeper.
// Closed forms throughout: sums over depths would be computed at run time, twenty clocks for every number.
template <int kK2, int kSegment>
struct TraceTree {
  static_assert(kSegment % 2 == 0 || kK2 % 2 == 0);
  static constexpr int bits_at(int depth) {
    return step_bits(kK2, depth & 1);
  }  // of the step behind the nodes at `depth`
  static constexpr int free_bits(int depth) { return depth / 2 * kK2 + depth % 2 * (kK2 / 2); }
  static constexpr int dropped_bits(int depth) { return depth / 2 * kK2 + depth % 2 * (kK2 - kK2 / 2); }
  static constexpr int kLeaves = 1 << free_bits(kSegment);
  static constexpr int node_of(int depth, int upper, int end) {
    return (upper << (16 - bits_at(depth) - free_bits(depth))) | (end >> dropped_bits(depth));
  }
};

// Scratch of one warp, for costs of 4 bytes.
template <int kK2, int kSegment>
struct TraceScratch {
  using Tree = TraceTree<kK2, kSegment>;
  int cost[Tree::kLeaves];
  int error[kSegment * Tree::kLeaves];       // of the branches, depth after depth
  uint8_t winner[kSegment * Tree::kLeaves];  // of the nodes
};

template <CostRule kRule>
struct IntegerTrace {
  using Cost = int;
  using Row = uint16_t;
  using Code = int16_t;
  static __device__ const Code* codes(const SearchTables& tables) { return tables.codes; }
  static __device__ int error(Code code, float w) { return integer_error(kRule, code, static_cast<int16_t>(w)); }
  static __device__ int add(int cost, int error) { return min(cost + error, kMostCost); }
  static __device__ int forbidden() { return kMostCost; }
  static __device__ int bits(int x) { return x; }
  static __device__ int from_bits(int x) { return x; }
};

struct FloatTrace {
  using Cost = float;
  using Row = float;
  using Code = float;
  static __device__ const Code* codes(const SearchTables& tables) { return tables.values; }
  static __device__ float error(Code code, float w) {
    const float d = __fsub_rn(code, w);
    return __fmul_rn(d, d);
  }
  static __device__ float add(float cost, float error) { return __fadd_rn(cost, error); }
  static __device__ float forbidden() { return __int_as_float(0x7F800000); }
  static __device__ int bits(float x) { return __float_as_int(x); }
  static __device__ float from_bits(int x) { return __int_as_float(x); }
};

__device__ __forceinline__ void prefetch_to_l2(const void* address) {
#if defined(__CUDA_ARCH__)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

// States of segments n_segments - 1 ... 0 of the best path that ends behind them in node `end`; returns the node it
// starts from. rows + s * n_nodes: costs in front of segment s; segment 0 starts in `start` alone when that is not
// negative. w [256]: targets by position. All lanes of a warp call and get the same answer.
template <class Trace, int kK2, int kSegment>
__device__ __noinline__ int trace_back(const SearchTables& tables, const typename Trace::Row* rows, int n_segments,
                                       int end, int start, const float* w, uint16_t* states,
                                       TraceScratch<kK2, kSegment>& scratch) {
  using Tree = TraceTree<kK2, kSegment>;
  using Cost = typename Trace::Cost;
  constexpr int kRow = 65536 >> step_bits(kK2, 0);
  constexpr int kLeafRounds = (Tree::kLeaves + 31) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  constexpr int kLine = 128;
  constexpr int kRowBytes = kRow * static_cast<int>(sizeof(typename Trace::Row));
  for (int s = n_segments - 1; s >= 0; --s) {
    // Which numbers of the row before the last are wanted is not known yet, so all of it is fetched near.
    if (s >= 2) {
      const char* next = reinterpret_cast<const char*>(rows + int64_t{s - 2} * kRow);
#pragma unroll 4
      for (int at = lane * kLine; at < kRowBytes; at += 32 * kLine) prefetch_to_l2(next + at);
    }
    typename Trace::Row leaf[kLeafRounds];
    typename Trace::Code code[kSegment][kLeafRounds];
#pragma unroll
    for (int r = 0; r < kLeafRounds; ++r) {
      const int u = lane + 32 * r;
      if (u < Tree::kLeaves) leaf[r] = __ldcg(rows + int64_t{s} * kRow + Tree::node_of(kSegment, u, end));
    }
#pragma unroll
    for (int depth = 0; depth < kSegment; ++depth) {
#pragma unroll
      for (int r = 0; r < kLeafRounds; ++r) {
        const int i = lane + 32 * r;
        const int upper = i & ((1 << Tree::free_bits(depth)) - 1);
        const int state =
            ((i >> Tree::free_bits(depth)) << (16 - Tree::bits_at(depth))) | Tree::node_of(depth, upper, end);
        if (i < (1 << Tree::free_bits(depth + 1))) code[depth][r] = __ldg(Trace::codes(tables) + state);
      }
    }
#pragma unroll
    for (int depth = 0; depth < kSegment; ++depth) {
      const float target = w[s * kSegment + kSegment - 1 - depth];
#pragma unroll
      for (int r = 0; r < kLeafRounds; ++r) {
        const int i = lane + 32 * r;
        if (i < (1 << Tree::free_bits(depth + 1)))
          scratch.error[depth * Tree::kLeaves + i] = Trace::bits(Trace::error(code[depth][r], target));
      }
    }
#pragma unroll
    for (int r = 0; r < kLeafRounds; ++r) {
      const int u = lane + 32 * r;
      if (u >= Tree::kLeaves) continue;
      Cost c = static_cast<Cost>(leaf[r]);
      if (s == 0 && start >= 0) c = Tree::node_of(kSegment, u, end) == start ? Cost(0) : Trace::forbidden();
      scratch.cost[u] = Trace::bits(c);
    }
    __syncwarp();
#pragma unroll
    for (int depth = kSegment - 1; depth >= 0; --depth) {
      constexpr int kMostBranches = 256;
      const int n_upper = 1 << Tree::free_bits(depth);
      const int n_branches = 1 << Tree::bits_at(depth);
      const int* error = scratch.error + depth * Tree::kLeaves;
      if (n_upper ==
          1) {  // one node: its branches over the lanes; nothing is added to costs that lanes without a branch hold
        Cost least = Trace::forbidden();
        int best = kMostBranches;
#pragma unroll
        for (int q0 = 0; q0 < n_branches; q0 += 32) {
          const int q = q0 + lane;
          if (q >= n_branches) continue;
          const Cost c = Trace::add(Trace::from_bits(scratch.cost[q]), Trace::from_bits(error[q]));
          if (best == kMostBranches || c < least) least = c, best = q;
        }
        // Costs are not negative, so their bits order as they do.
        const unsigned least_of_all = __reduce_min_sync(
            0xFFFFFFFFu, best == kMostBranches ? 0xFFFFFFFFu : static_cast<unsigned>(Trace::bits(least)));
        const bool ties = best != kMostBranches && static_cast<unsigned>(Trace::bits(least)) == least_of_all;
        best = static_cast<int>(__reduce_min_sync(0xFFFFFFFFu, ties ? static_cast<unsigned>(best) : 0xFFFFFFFFu));
        if (lane == 0) scratch.winner[depth * Tree::kLeaves] = static_cast<uint8_t>(best);
      } else {
#pragma unroll
        for (int u0 = 0; u0 < n_upper; u0 += 32) {
          const int u = u0 + lane;
          if (u >= n_upper) continue;
          Cost least = Trace::add(Trace::from_bits(scratch.cost[u]), Trace::from_bits(error[u]));
          int best = 0;
#pragma unroll
          for (int q = 1; q < n_branches; ++q) {
            const Cost c =
                Trace::add(Trace::from_bits(scratch.cost[q * n_upper + u]), Trace::from_bits(error[q * n_upper + u]));
            if (c < least) least = c, best = q;
          }
          scratch.cost[u] = Trace::bits(least);
          scratch.winner[depth * Tree::kLeaves + u] = static_cast<uint8_t>(best);
        }
      }
      __syncwarp();
    }
    int upper = 0;
#pragma unroll
    for (int depth = 0; depth < kSegment; ++depth) {
      const int q = scratch.winner[depth * Tree::kLeaves + upper];
      if (lane == 0) {
        states[s * kSegment + kSegment - 1 - depth] =
            static_cast<uint16_t>((q << (16 - Tree::bits_at(depth))) | Tree::node_of(depth, upper, end));
      }
      upper |= q << Tree::free_bits(depth);
    }
    end = Tree::node_of(kSegment, upper, end);
    __syncwarp();
  }
  return end;
}

}  // namespace espalier::codec::cuda
