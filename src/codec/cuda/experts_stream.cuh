// A warp's way through its stretch of packed memory: blocks are requested into registers two ahead, multiplied as they come, and the sums
// are stored whenever a column group ends. The loop is of two blocks: it fits the innermost instruction cache.
#pragma once

#include "codec/cuda/arrivals.cuh"
#include "codec/cuda/experts_plan.cuh"

namespace espalier::codec::cuda {

inline constexpr int kHeadroom = 23;     // bits by which the largest block of a row is shifted up in 64-bit sums
inline constexpr int kNotFinite = 1000;  // exponent of a block with NaN or infinity

// What a warp does of one job: pairs [begin, end), counted through the column groups.
struct Stretch {
  const uint32_t* blocks;
  int begin, end;
  int n_pairs;             // of a column group
  int n_rows;
  const uint8_t* digits;   // this lane's eight bytes of pair 0
  const FfScale* scales;   // down: block scales of row lane % 4
  int part;                // of column group 0
  const Start* announced;  // null: has been announced
};

// Multiplier of a block's sums in a row's 64-bit sum; blocks 2^24 times smaller than the largest drop out.
__device__ __forceinline__ int unit_of(int exponent, int top) {
  const int shift = kHeadroom + exponent - top;
  return shift < 0 || exponent == kNotFinite ? 0 : 1 << shift;
}

// Largest exponent of a row with n_blocks; `from`, `step`: which of the lanes that share the row this is.
__device__ __forceinline__ int top_exponent(const FfScale* scales, int n_blocks, int from, int step) {
  int top = -1000;
  for (int c = from; c < n_blocks; c += step) top = max(top, __ldcg(&scales[c].exponent));
  return top;
}

// Lane i: raises the counter of the i-th column group from `from` on by the pairs that this warp adds to it; returns the sum.
template <bool kDown>
__device__ __forceinline__ uint32_t announce(const ExpertsArguments& a, const Start& w, int from, int lane) {
  const int n_groups = (kDown ? a.d_model : a.d_ff) / kGroupColumns, n_pairs = (kDown ? a.d_ff : a.d_model) / kPairRows;
  const int g = from + lane;
  if (g > w.last) return 0;
  const int job = g / n_groups, block = (g - job * n_groups) / 2;
  const uint32_t count = g == w.first ? w.first_pairs : g == w.last ? w.last_pairs : n_pairs;
  uint32_t* counter = kDown ? a.down_arrivals + job * (a.d_model / kChunk) + block : a.up_arrivals + job / 2 * (a.d_ff / kChunk) + block;
  return atomicAdd(counter, count) + count;
}

// Scales that the finisher of an announced block will want, on their way to the L2 while the warp streams.
template <bool kDown>
__device__ __forceinline__ void prefetch_scales(const ExpertsArguments& a, int group) {
  const int n_groups = (kDown ? a.d_model : a.d_ff) / kGroupColumns;
  const int job = group / n_groups, block = (group - job * n_groups) / 2;
  const Entry& entry = a.plan->entries[kDown ? job : job / 2];
  const auto prefetch = [&](const uint16_t* scales) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(scales + block * kChunk));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(scales + block * kChunk + kChunk / 2));
  };
  if constexpr (kDown) {
    prefetch(entry.down_svh);
  } else {
    prefetch(entry.gate_svh);
    prefetch(entry.up_svh);
    prefetch(entry.down_suh);
  }
}

// To be called by every stretch once its weights are requested. The counts of the first 32 column groups stay in `announcements`.
template <bool kDown>
__device__ __forceinline__ void announce_first(const ExpertsArguments& a, const Stretch& s, int lane, uint32_t* announcements) {
  if (s.announced == nullptr) return;
  const uint32_t count = announce<kDown>(a, *s.announced, s.announced->first, lane);
  announcements[threadIdx.x] = count;
  if (count == (kDown ? 2u : 4u) * s.n_pairs) prefetch_scales<kDown>(a, s.announced->first + lane);
}

template <bool kDown>
__device__ __forceinline__ int row_top(const Stretch& s, int lane) {
  int top = 0;
  if constexpr (kDown) {
    top = top_exponent(s.scales, s.n_pairs / kChunkPairs, lane / 4, 8);
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) top = max(top, __shfl_xor_sync(0xFFFFFFFFu, top, distance));
  }
  return top;
}

// Adds a chunk's sums to the 64-bit sums and clears them.
__device__ __forceinline__ void fold_chunk(int (&acc)[1][kGroupTiles][4], int64_t (&sum)[kGroupTiles][2], int unit) {
#pragma unroll
  for (int nt = 0; nt < kGroupTiles; ++nt) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      sum[nt][c] += int64_t{acc[0][nt][2 * c]} * (kResidualUnits * unit) + int64_t{acc[0][nt][2 * c + 1]} * unit;
      acc[0][nt][2 * c] = acc[0][nt][2 * c + 1] = 0;
    }
  }
}

// Stores a column group's sums and clears them. An element is one 64-bit store.
template <bool kDown>
__device__ __forceinline__ void store_sums(const ExpertsArguments& a, const Stretch& s, int group, int lane, int (&acc)[1][kGroupTiles][4],
                                           int64_t (&sum)[kGroupTiles][2]) {
  if (lane % 4 < s.n_rows) {
    const int64_t to = (int64_t{s.part + group} * kSetRows + lane % 4) * kGroupColumns + lane / 4;
    uint64_t* parts = kDown ? reinterpret_cast<uint64_t*>(a.down_parts + to) : reinterpret_cast<uint64_t*>(a.up_parts + to);
#pragma unroll
    for (int nt = 0; nt < kGroupTiles; ++nt) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint64_t value = kDown ? static_cast<uint64_t>(sum[nt][c])
                                     : uint64_t{static_cast<uint32_t>(acc[0][nt][2 * c])} | uint64_t{static_cast<uint32_t>(acc[0][nt][2 * c + 1])} << 32;
        store_relaxed(parts + 16 * nt + 8 * c, value);
      }
    }
  }
#pragma unroll
  for (int nt = 0; nt < kGroupTiles; ++nt) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if constexpr (kDown) sum[nt][c] = 0;
      acc[0][nt][2 * c] = acc[0][nt][2 * c + 1] = 0;
    }
  }
}

__device__ __forceinline__ uint2 load_digits(const uint8_t* from) { return *reinterpret_cast<const uint2*>(from); }

// Where a lane's words of the next blocks are: a pointer for each kind of load, so that none is calculated again in the loop.
template <int k2>
struct LanePointers {
  const uint32_t *by_four, *by_two, *single;

  __device__ __forceinline__ LanePointers(const uint32_t* block, int lane) {
    constexpr int quads = 4 * (k2 / 4), rest = k2 % 4;
    by_four = block + 4 * lane;
    by_two = block + 32 * quads + 2 * lane;
    single = block + 32 * (quads + rest - 1) + lane;
  }
  // The words of the block `ahead` blocks further.
  __device__ __forceinline__ void load(int ahead, uint32_t (&w)[k2]) const {
    constexpr int quads = 4 * (k2 / 4), rest = k2 % 4, step = static_cast<int>(block_words(k2));
#pragma unroll
    for (int j = 0; j < k2 / 4; ++j) {
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(w[4 * j]), "=r"(w[4 * j + 1]), "=r"(w[4 * j + 2]), "=r"(w[4 * j + 3])
                   : "l"(by_four + ahead * step + 128 * j));
    }
    if constexpr (rest >= 2) {
      asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(w[quads]), "=r"(w[quads + 1]) : "l"(by_two + ahead * step));
    }
    if constexpr (rest % 2 == 1) asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(w[k2 - 1]) : "l"(single + ahead * step));
  }
  __device__ __forceinline__ void advance(int blocks) {
    constexpr int step = static_cast<int>(block_words(k2));
    by_four += blocks * step, by_two += blocks * step, single += blocks * step;
    if constexpr (k2 / 4 > 0) asm volatile("" : "+l"(by_four));  // or the compiler derives one from another in every iteration
    if constexpr (k2 % 4 >= 2) asm volatile("" : "+l"(by_two));
    if constexpr (k2 % 2 == 1) asm volatile("" : "+l"(single));
  }
};

template <int k2, bool kDown>
__device__ __forceinline__ void stream_pairs(const ExpertsArguments& a, const Stretch& s, uint32_t* announcements) {
  const int lane = threadIdx.x % 32;
  int neighbour = ring_neighbour(lane);
  asm volatile("" : "+r"(neighbour));
  // Pairs are taken in twos; of the first and the last two one may be someone else's.
  int group = s.begin / s.n_pairs, pair = s.begin - s.begin % 2, kp = pair - group * s.n_pairs;
  const int skipped = s.begin % 2;
  LanePointers<k2> from(s.blocks + int64_t{pair} * block_words(k2), lane);
  from.advance(0);
  uint32_t w[2][k2];
  if (skipped == 0) {
    from.load(0, w[0]);
  } else if (pair + 2 < s.end) {
    from.load(2, w[0]);
  }
  if (pair + 1 < s.end) from.load(1, w[1]);
  announce_first<kDown>(a, s, lane, announcements);
  wait_for_previous_kernel();  // weights do not depend on it, everything below does

  const uint8_t* digits = s.digits + kp * kPairBytes;
  uint2 b[2][1];
  b[0][0] = load_digits(kp + 2 * skipped == s.n_pairs ? s.digits : digits + 2 * skipped * kPairBytes);
  b[1][0] = load_digits(digits + kPairBytes);
  const int top = row_top<kDown>(s, lane);
  int acc[1][kGroupTiles][4] = {};
  int64_t sum[kGroupTiles][2] = {};
  int exponent = 0;
  if constexpr (kDown) exponent = __ldcg(&s.scales[kp / kChunkPairs].exponent);
#pragma unroll 1
  while (true) {
    kp += 2;
    const bool ends_group = kp == s.n_pairs;
    const uint8_t* next = ends_group ? s.digits : digits + 2 * kPairBytes;
    if (pair >= s.begin) {
      multiply_block<k2, 1>(w[0], b[0], neighbour, acc);
      if (pair + 2 < s.end) from.load(2, w[0]);
      b[0][0] = load_digits(next);
    }
    if (pair + 1 < s.end) {
      multiply_block<k2, 1>(w[1], b[1], neighbour, acc);
      if (pair + 3 < s.end) from.load(3, w[1]);
      b[1][0] = load_digits(next + kPairBytes);
    }
    pair += 2, digits = next;
    from.advance(2);
    const bool ends = ends_group || pair >= s.end;
    if (kDown && (kp % kChunkPairs == 0 || ends)) {
      fold_chunk(acc, sum, unit_of(exponent, top));
      exponent = __ldcg(&s.scales[ends_group ? 0 : kp / kChunkPairs].exponent);
    }
    if (ends) {
      store_sums<kDown>(a, s, group, lane, acc, sum);
      if (pair >= s.end) return;
      ++group;
      kp = 0;
    }
  }
}


// Bit k2: a kernel serves jobs of that width.
using Widths = uint32_t;
constexpr Widths kAllWidths = 1u << 2 | 1u << 3 | 1u << 4 | 1u << 5 | 1u << 6 | 1u << 7 | 1u << 8 | 1u << 10 | 1u << 12 | 1u << 14 | 1u << 16;
constexpr Widths kCommonWidths = 1u << 4 | 1u << 6 | 1u << 8 | 1u << 10;

// The width is a number at run time, per job: experts of one layer differ.
template <bool kDown, Widths kWidths, int k2 = 2>
__device__ __forceinline__ void stream_any_width(const ExpertsArguments& a, const Stretch& s, int job_k2, uint32_t* announcements) {
  if constexpr ((kWidths >> k2 & 1u) != 0) {
    if ((kWidths >> (k2 + 1)) == 0 || job_k2 == k2) return stream_pairs<k2, kDown>(a, s, announcements);
  }
  if constexpr ((kWidths >> (k2 + 1)) != 0) stream_any_width<kDown, kWidths, k2 + 1>(a, s, job_k2, announcements);
}

}  // namespace espalier::codec::cuda
