// A packed block of 32 rows x 64 columns back to codebook values. Device code only; the layout is explained in windows.h.
#pragma once

#include "codec/cuda/lanes.cuh"
#include "codec/cuda/matrix.h"

namespace espalier::codec::cuda {

__device__ __forceinline__ uint32_t sum_of_halves(uint32_t product) {
  const uint32_t q = (product & 0x8FFF8FFFu) ^ 0x3B603B60u;
  return __half_as_ushort(__hadd(__ushort_as_half(static_cast<uint16_t>(q)), __ushort_as_half(static_cast<uint16_t>(q >> 16))));
}

// fp16 bits of a state, with the single rounding that the format asks for.
__device__ __forceinline__ uint16_t value_of(Codebook codebook, uint32_t state) {
  if (codebook == Codebook::kMul1) {
    const uint32_t sum = __dp4a(state * kMul1Multiplier, 0x01010101u, 0x6400u);  // 0x6400 + sum is half(1024 + sum)
    const __half value = __hfma(__ushort_as_half(static_cast<uint16_t>(sum)), __ushort_as_half(0x1EEE), __ushort_as_half(0xC931));
    return __half_as_ushort(value);
  }
  return static_cast<uint16_t>(sum_of_halves(codebook == Codebook::kMcg ? state * kMcgMultiplier : state * 89226354u + 64248484u));
}

// Decodes one block by one warp; put(row 0..31, column 0..63, fp16 bits).
template <int k2, typename Put>
__device__ void decode_block(const uint32_t* block, Codebook codebook, int lane, Put put) {
  uint32_t w[k2];
  load_block<k2>(block, lane, w);
  uint32_t ends[2];
  for (int half = 0; half < 2; ++half) ends[half] = __shfl_sync(0xFFFFFFFFu, pack_ends<k2>(w, half), ring_neighbour(lane));
#pragma unroll
  for (int nt = 0; nt < kGroupTiles; ++nt) {
    uint32_t s[string_words(k2)];
    bit_string<k2>(w, ends[nt / 2], nt % 2 != 0, nt, s);
#pragma unroll
    for (int i = 0; i < kPositions; ++i) {
      const int row = 16 * lane_half(lane) + 4 * (lane % 2) + 2 * (i / 8) + (i & 1) + 8 * (i >> 1 & 1);
      put(row, 16 * nt + lane / 4 + 8 * (i >> 2 & 1), value_of(codebook, window<k2>(s, i)));
    }
  }
}

// The width is a number at run time here: these kernels are bound by what they write, or by their products.
template <typename Put>
__device__ void decode_block_of_any_width(const DeviceMatrix& m, int64_t index, int lane, Put put) {
  const uint32_t* block = m.blocks + index * block_words(m.k2);
  switch (m.k2) {
    case 2: return decode_block<2>(block, m.codebook, lane, put);
    case 3: return decode_block<3>(block, m.codebook, lane, put);
    case 4: return decode_block<4>(block, m.codebook, lane, put);
    case 5: return decode_block<5>(block, m.codebook, lane, put);
    case 6: return decode_block<6>(block, m.codebook, lane, put);
    case 7: return decode_block<7>(block, m.codebook, lane, put);
    case 8: return decode_block<8>(block, m.codebook, lane, put);
    case 10: return decode_block<10>(block, m.codebook, lane, put);
    case 12: return decode_block<12>(block, m.codebook, lane, put);
    case 14: return decode_block<14>(block, m.codebook, lane, put);
    case 16: return decode_block<16>(block, m.codebook, lane, put);
  }
}

}  // namespace espalier::codec::cuda
