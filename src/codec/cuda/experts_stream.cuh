// A warp's way through its stretch of packed memory: blocks come through a ring in shared memory, are multiplied as they come, and the
// sums are stored whenever a column group ends.
#pragma once

#include "codec/cuda/experts_plan.cuh"

namespace espalier::codec::cuda {

inline constexpr int kRingBytes = 6144;  // of a warp: two blocks of eight fit every GPU since sm_80
inline constexpr int kDigitBytes = kSetRows * kPairBytes;
inline constexpr int kHeadroom = 23;     // bits by which the largest block of a row is shifted up in 64-bit sums
inline constexpr int kNotFinite = 1000;  // exponent of a block with NaN or infinity

// What a warp does of one job: pairs [begin, end), counted through the column groups.
struct Stretch {
  const uint32_t* blocks;
  int begin, end;
  int n_pairs;             // of a column group
  int n_rows;
  const uint8_t* digits;   // of row lane/4 % 4, pair 0, 16 bytes a lane
  const FfScale* scales;   // down: block scales of row lane % 4
  int part;                // of column group 0
};

// What a warp has added to: all column groups from first to last, the inner ones wholly.
struct Added {
  int first = -1, first_pairs = 0, last = -1, last_pairs = 0;
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

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// `ring` is the warp's own. Column groups are numbered through all jobs: `first_group` is this job's first.
template <int k2, bool kDown>
__device__ __forceinline__ void stream_pairs(const ExpertsArguments& a, const Stretch& s, int lane, uint8_t* ring, int first_group, Added& added) {
  constexpr int kBlockBytes = 128 * k2, kPlace = kBlockBytes + kDigitBytes;
  constexpr int kPlaces = kRingBytes / kPlace < 8 ? kRingBytes / kPlace : 8;
  static_assert(kPlaces >= 2);

  // Requests: the next pair, its place in the ring, its place in the column group.
  const uint8_t* from = reinterpret_cast<const uint8_t*>(s.blocks) + int64_t{s.begin} * kBlockBytes + 16 * lane;
  const uint32_t ring_to = shared_address(ring) + 16 * lane;
  int group = s.begin / s.n_pairs, kp = s.begin - group * s.n_pairs;
  int asked = s.begin, asked_kp = kp;
  uint32_t asked_at = 0;
  const auto ask_block = [&](uint32_t place) {
#pragma unroll
    for (int c = 0; c < (8 * k2 + 31) / 32; ++c) {
      if (8 * k2 % 32 == 0 || 32 * c + lane < 8 * k2) copy_async(ring_to + place + 512 * c, from + 512 * c);
    }
    from += kBlockBytes;
  };
  const auto ask_digits = [&] {
    if (lane < 4 * s.n_rows) copy_async(ring_to + asked_at + kBlockBytes, s.digits + asked_kp * kPairBytes);
    asked_kp = asked_kp + 1 == s.n_pairs ? 0 : asked_kp + 1;
    asked_at = asked_at + kPlace == kPlaces * kPlace ? 0 : asked_at + kPlace;
    ++asked;
  };
  __syncwarp();  // the ring may have been read by the stretch before
#pragma unroll
  for (int d = 0; d < kPlaces - 1; ++d) {
    if (s.begin + d < s.end) ask_block(d * kPlace);
  }
  wait_for_previous_kernel();  // weights do not depend on it, everything below does
#pragma unroll
  for (int d = 0; d < kPlaces - 1; ++d) {
    if (asked < s.end) ask_digits();
    end_copy_group();
  }

  int top = 0;
  if constexpr (kDown) {
    top = top_exponent(s.scales, s.n_pairs / kChunkPairs, lane / 4, 8);
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) top = max(top, __shfl_xor_sync(0xFFFFFFFFu, top, distance));
  }
  const int column = lane / 4;  // of the B operand: row column/2, main or residual; columns without a row repeat row 0
  const uint8_t* digits = ring + kBlockBytes + (column / 2 < s.n_rows ? column / 2 : 0) * kPairBytes + column % 2 * 32 + lane % 4 * 8;
  int acc[1][kGroupTiles][4] = {};
  int64_t sum[kGroupTiles][2] = {};
  int exponent = 0, at = 0, group_begin = s.begin;
  if constexpr (kDown) exponent = __ldcg(&s.scales[kp / kChunkPairs].exponent);
#pragma unroll 1
  for (int p = s.begin; p < s.end; ++p) {
    wait_for_copies<kPlaces - 2>();
    __syncwarp();
    if (asked < s.end) {
      ask_block(asked_at);
      ask_digits();
    }
    end_copy_group();
    multiply_shared_block<k2>(reinterpret_cast<const uint32_t*>(ring + at), lane, *reinterpret_cast<const uint2*>(digits + at), acc);
    at = at + kPlace == kPlaces * kPlace ? 0 : at + kPlace;
    ++kp;
    const bool ends = kp == s.n_pairs || p + 1 == s.end;
    if (kDown && (kp % kChunkPairs == 0 || ends)) {
      const int unit = unit_of(exponent, top);
#pragma unroll
      for (int nt = 0; nt < kGroupTiles; ++nt) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          sum[nt][c] += int64_t{acc[0][nt][2 * c]} * (kResidualUnits * unit) + int64_t{acc[0][nt][2 * c + 1]} * unit;
          acc[0][nt][2 * c] = acc[0][nt][2 * c + 1] = 0;
        }
      }
      if (!ends) exponent = __ldcg(&s.scales[kp / kChunkPairs].exponent);
    }
    if (ends) {
      if (lane % 4 < s.n_rows) {
        const int64_t to = (int64_t{s.part + group} * kSetRows + lane % 4) * kGroupColumns + lane / 4;
#pragma unroll
        for (int nt = 0; nt < kGroupTiles; ++nt) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            if constexpr (kDown) {
              __stcg(reinterpret_cast<long long*>(a.down_parts + to + 16 * nt + 8 * c), static_cast<long long>(sum[nt][c]));
            } else {
              __stcg(reinterpret_cast<int2*>(a.up_parts + to + 16 * nt + 8 * c), int2{acc[0][nt][2 * c], acc[0][nt][2 * c + 1]});
            }
          }
        }
      }
#pragma unroll
      for (int nt = 0; nt < kGroupTiles; ++nt) {
#pragma unroll
        for (int c = 0; c < 4; ++c) acc[0][nt][c] = 0;
        sum[nt][0] = sum[nt][1] = 0;
      }
      added.last = first_group + group;
      added.last_pairs = p + 1 - group_begin;
      if (added.first < 0) added.first = added.last, added.first_pairs = added.last_pairs;
      ++group;
      kp = 0;
      group_begin = p + 1;
      if (kDown && p + 1 < s.end) exponent = __ldcg(&s.scales[0].exponent);
    }
  }
}

// The width is a number at run time, per job: experts of one layer differ.
template <bool kDown>
__device__ __forceinline__ void stream_any_width(const ExpertsArguments& a, const Stretch& s, int k2, int lane, uint8_t* ring, int first_group,
                                                 Added& added) {
  switch (k2) {
    case 2: return stream_pairs<2, kDown>(a, s, lane, ring, first_group, added);
    case 3: return stream_pairs<3, kDown>(a, s, lane, ring, first_group, added);
    case 4: return stream_pairs<4, kDown>(a, s, lane, ring, first_group, added);
    case 5: return stream_pairs<5, kDown>(a, s, lane, ring, first_group, added);
    case 6: return stream_pairs<6, kDown>(a, s, lane, ring, first_group, added);
    case 7: return stream_pairs<7, kDown>(a, s, lane, ring, first_group, added);
    case 8: return stream_pairs<8, kDown>(a, s, lane, ring, first_group, added);
    case 10: return stream_pairs<10, kDown>(a, s, lane, ring, first_group, added);
    case 12: return stream_pairs<12, kDown>(a, s, lane, ring, first_group, added);
    case 14: return stream_pairs<14, kDown>(a, s, lane, ring, first_group, added);
    case 16: return stream_pairs<16, kDown>(a, s, lane, ring, first_group, added);
  }
}

}  // namespace espalier::codec::cuda
