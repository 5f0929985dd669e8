// AArch64 with the dot product extension (compiled with +dotprod, chosen at run time).
#include <arm_neon.h>

#include <array>
#include <cstring>

#include "codec/int8_matmul_kernels.h"
#include "codec/int8_matmul_rows_impl.h"
#include "codec/int8_matmul_windows.h"

namespace espalier::codec {
namespace {

constexpr int kTilesPerBlock = kBlock / kTile;  // along n
constexpr int kTilesPerChunk = kChunk / kTile;  // along k
constexpr int kVectors = RingWindows::kVectors;
constexpr int kQuarters = 4;  // a register holds lanes 2g and 2g + 1 of a vector of int8_matmul_windows.h

template <int kK2>
struct Layout {
  static constexpr RingWindows kWindows = make_ring_windows(kK2);

  // Two neighbouring states, 16 + K bits, lie in the 32 bits from some byte of their pair of words on: `bytes` moves
  // these to a dword, `right` (negative: to the right) brings the first state to its lower half, `left` the second to
  // its upper half.
  struct Cut {
    alignas(16) std::array<uint8_t, 16> bytes;
    alignas(16) std::array<int32_t, 4> right;
    alignas(16) std::array<int32_t, 4> left;
  };
  using Cuts = std::array<std::array<Cut, kQuarters>, kVectors>;
  static constexpr Cuts make_cuts() {
    Cuts cuts{};
    for (int v = 0; v < kVectors; ++v) {
      for (int d = 0; d < 16; ++d) {  // dword of the whole vector
        const int lane = d / 2;
        const int first = kWindows.below[v][lane][2 * (d % 2)];
        const int second = kWindows.below[v][lane][2 * (d % 2) + 1];
        const int byte = second / 8 < 4 ? second / 8 : 4;
        Cut& cut = cuts[v][d / 4];
        // The register has w[j] above w[j-1], the ring the other way round.
        for (int b = 0; b < 4; ++b)
          cut.bytes[4 * (d % 4) + b] = static_cast<uint8_t>(8 * (lane % 2) + (byte + b + 4) % 8);
        cut.right[d % 4] = -(first - 8 * byte);
        cut.left[d % 4] = 16 - (second - 8 * byte);
      }
    }
    return cuts;
  }
  static constexpr Cuts kCuts = make_cuts();
};

// The pair (w[j-1], w[j]) of a tile.
template <int kK2>
inline uint64x1_t pair_at(const uint16_t* tile, int j) {
  uint64_t pair;
  if (j > 0) {
    std::memcpy(&pair, tile + 2 * (j - 1), sizeof pair);
  } else {
    uint32_t first, last;
    std::memcpy(&first, tile, sizeof first);
    std::memcpy(&last, tile + 2 * (4 * kK2 - 1), sizeof last);
    pair = static_cast<uint64_t>(first) << 32 | last;
  }
  return vcreate_u64(pair);
}

// sums [64 vectors, 32]:i16 = byte sums of one tile column of the chunk.
template <int kK2>
void decode_sums(const uint16_t* tile, int64_t tile_row_words, int64_t next_words, int16_t* sums) {
  using L = Layout<kK2>;
  const uint32x4_t multiplier = vdupq_n_u32(kMul1Multiplier);
  const uint8x16_t ones = vdupq_n_u8(1);
  const uint32x4_t upper_half = vdupq_n_u32(0xFFFF0000u);
  for (int rt = 0; rt < kTilesPerChunk; ++rt, tile += tile_row_words) {
    for (int w = 0; w < 8 * kK2; w += 32) __builtin_prefetch(tile + next_words + w);
    for (int g = 0; g < kQuarters; ++g) {
      uint8x16_t slots[RingWindows::kMaxSlots];
#pragma GCC unroll 8
      for (int s = 0; s < L::kWindows.n_slots; ++s) {
        const int* word = L::kWindows.word[s] + 2 * g;
        slots[s] = vreinterpretq_u8_u64(vcombine_u64(pair_at<kK2>(tile, word[0]), pair_at<kK2>(tile, word[1])));
      }
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const auto& cut = L::kCuts[v][static_cast<size_t>(g)];
        const uint8x16_t bytes = vld1q_u8(cut.bytes.data());
        const int* slot = L::kWindows.slot[v];
        uint32x4_t bits = vreinterpretq_u32_u8(vqtbl1q_u8(slots[slot[0]], bytes));
        if (slot[1] != slot[0]) {  // dwords 1 and 3 hold positions 2 and 3 of their lanes
          const uint32x4_t other = vreinterpretq_u32_u8(vqtbl1q_u8(slots[slot[1]], bytes));
          bits = vbslq_u32(vreinterpretq_u32_u64(vdupq_n_u64(0xFFFFFFFF00000000ull)), other, bits);
        }
        const uint32x4_t first = vshlq_u32(bits, vld1q_s32(cut.right.data()));
        const uint32x4_t second = vshlq_u32(bits, vld1q_s32(cut.left.data()));
        const uint16x8_t states = vreinterpretq_u16_u32(vbslq_u32(upper_half, second, first));
        const uint32x4_t product0 = vmulq_u32(vmovl_u16(vget_low_u16(states)), multiplier);
        const uint32x4_t product1 = vmulq_u32(vmovl_high_u16(states), multiplier);
        const uint32x4_t sum0 = vdotq_u32(vdupq_n_u32(0), vreinterpretq_u8_u32(product0), ones);
        const uint32x4_t sum1 = vdotq_u32(vdupq_n_u32(0), vreinterpretq_u8_u32(product1), ones);
        const uint16x8_t both = vuzp1q_u16(vreinterpretq_u16_u32(sum0), vreinterpretq_u16_u32(sum1));
        vst1q_s16(sums + (rt * kVectors + v) * 32 + 8 * g, vreinterpretq_s16_u16(both));
      }
    }
  }
}

// kRows rows times lanes 4q .. 4q+3 of half h: columns 8h + 4q .. 8h + 4q + 3.
template <int kRows>
void multiply_lanes(const int16_t* sums, const Int8Rows& a, int64_t first_row, int lane, float* z) {
  int32x4_t acc[kRows][4];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < 4; ++c) acc[r][c] = vdupq_n_s32(0);
  }
  const uint64_t* quads = a.quads + first_row * kQuadsPerChunk;
  for (int t = 0; t < kQuadsPerChunk; ++t) {
    const int16x8_t pair0 = vld1q_s16(sums + 64 * t + 4 * lane);
    const int16x8_t pair1 = vld1q_s16(sums + 64 * t + 4 * lane + 8);
    for (int r = 0; r < kRows; ++r) {
      const int16x4_t x = vreinterpret_s16_u64(vld1_u64(quads + r * kQuadsPerChunk + t));
      acc[r][0] = vmlal_s16(acc[r][0], vget_low_s16(pair0), x);
      acc[r][1] = vmlal_s16(acc[r][1], vget_high_s16(pair0), x);
      acc[r][2] = vmlal_s16(acc[r][2], vget_low_s16(pair1), x);
      acc[r][3] = vmlal_s16(acc[r][3], vget_high_s16(pair1), x);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = first_row + r;
    const int32x4_t sum = vpaddq_s32(vpaddq_s32(acc[r][0], acc[r][1]), vpaddq_s32(acc[r][2], acc[r][3]));
    const float32x4_t t = vcvtq_f32_s32(vsubq_s32(sum, vdupq_n_s32(a.centre[row])));
    float* zr = z + row * kBlock + lane;
    vst1q_f32(zr, vfmaq_f32(vld1q_f32(zr), t, vdupq_n_f32(a.scale[row])));
  }
}

void words(const TrellisView& view, const Int8Place& place, const Int8Rows& a, float* z) {
  const int64_t tile_row_words = view.n / kTile * tile_words(view.k2);
  for (int ct = 0; ct < kTilesPerBlock; ++ct) {
    const uint16_t* tile = view.tile(place.chunk * kTilesPerChunk, place.block * kTilesPerBlock + ct);
    alignas(16) int16_t sums[kChunk * kTile];
    with_width(view.k2, [&]<int kK2>() { decode_sums<kK2>(tile, tile_row_words, place.next_words, sums); });
    float* zc = z + ct * kTile;
    for (int lane = 0; lane < kTile; lane += 4) {  // 0-7: half 0, 8-15: half 1; a tile's columns in order
      int64_t r = 0;
      for (; r + 4 <= a.rows; r += 4) multiply_lanes<4>(sums, a, r, lane, zc);
      for (; r < a.rows; ++r) multiply_lanes<1>(sums, a, r, lane, zc);
    }
  }
}

}  // namespace

const Int8Kernels& int8_kernels_neon() {
  static constexpr Int8Kernels kKernels = {words, nullptr, 0, Int8Form::kPlainBytes, quantize_rows, rotate_rows};
  return kKernels;
}

}  // namespace espalier::codec
