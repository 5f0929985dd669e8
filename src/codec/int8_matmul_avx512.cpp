// GCC 12's own AVX-512 header reads a deliberately undefined operand of an unmasked operation.
#pragma GCC diagnostic ignored "-Wuninitialized"

#include <immintrin.h>

#include <array>

#include "codec/int8_matmul_kernels.h"
#include "codec/int8_matmul_rows_impl.h"
#include "codec/int8_matmul_windows.h"

namespace espalier::codec {
namespace {

constexpr int kTilesPerBlock = kBlock / kTile;  // along n
constexpr int kTilesPerChunk = kChunk / kTile;  // along k
constexpr int kVectors = RingWindows::kVectors;

template <int kK2>
struct Layout {
  static constexpr RingWindows kWindows = make_ring_windows(kK2);
  static constexpr int kRegisters = (kWindows.n_words + 15) / 16;

  // Dword permutation of the tile's words for every slot.
  using Pick = std::array<std::array<int32_t, 16>, RingWindows::kMaxSlots>;
  static constexpr Pick make_pick() {
    Pick pick{};
    for (int s = 0; s < kWindows.n_slots; ++s) {
      for (int i = 0; i < 8; ++i) {
        pick[s][2 * i] = (kWindows.word[s][i] + kWindows.n_words - 1) % kWindows.n_words;
        pick[s][2 * i + 1] = kWindows.word[s][i];
      }
    }
    return pick;
  }
  // Byte controls of vpmultishiftqb: the pair lies in the register as w[j] * 2^32 + w[j-1], which is the ring's order
  // turned by 32 bits; the instruction's windows wrap around, so 32 more than the ring's offset finds them.
  using Control = std::array<std::array<uint8_t, 64>, kVectors>;
  static constexpr Control make_control() {
    Control control{};
    for (int v = 0; v < kVectors; ++v) {
      for (int i = 0; i < 8; ++i) {
        for (int q = 0; q < 4; ++q) {
          control[v][8 * i + 2 * q] = static_cast<uint8_t>((kWindows.below[v][i][q] + 32) % 64);
          control[v][8 * i + 2 * q + 1] = static_cast<uint8_t>((kWindows.below[v][i][q] + 40) % 64);
        }
      }
    }
    return control;
  }
  using Masks = std::array<uint16_t, RingWindows::kMaxSlots>;
  static constexpr Masks make_masks(int r) {
    Masks masks{};
    for (int s = 0; s < kWindows.n_slots; ++s) {
      for (int i = 0; i < 16; ++i) masks[s] = static_cast<uint16_t>(masks[s] | (kPick[s][i] / 16 == r ? 1 : 0) << i);
    }
    return masks;
  }
  static constexpr bool is_identity(int s) {
    for (int i = 0; i < 16; ++i) {
      if (kPick[s][i] != i) return false;
    }
    return true;
  }

  alignas(64) static constexpr Pick kPick = make_pick();
  alignas(64) static constexpr Control kControl = make_control();
  static constexpr Masks kInThird = make_masks(2);
  static constexpr Masks kInFourth = make_masks(3);
};

// The controls in registers: where there is room, the assembly keeps the compiler from loading them at every use.
template <int kK2>
struct Controls {
  __m512i c[kVectors];

  Controls() {
    for (int v = 0; v < kVectors; ++v) {
      c[v] = _mm512_load_si512(Layout<kK2>::kControl[v].data());
      asm("" : "+v"(c[v]));
    }
  }
};

// A tile's words arranged into the slots of its width.
template <int kK2>
struct Slots {
  using L = Layout<kK2>;
  __m512i s[L::kWindows.n_slots];

  explicit Slots(const uint16_t* tile) {
    constexpr int kRest = L::kWindows.n_words % 16;
    __m512i w[L::kRegisters];
    for (int r = 0; r < L::kRegisters; ++r) {
      if (r == L::kRegisters - 1 && kRest != 0) {
        w[r] = _mm512_maskz_loadu_epi32((1u << kRest) - 1, tile + 32 * r);
      } else {
        w[r] = _mm512_loadu_si512(tile + 32 * r);
      }
    }
    for (int i = 0; i < L::kWindows.n_slots; ++i) {
      const __m512i pick = _mm512_load_si512(L::kPick[i].data());
      if constexpr (L::kRegisters == 1) {
        s[i] = L::is_identity(i) ? w[0] : _mm512_permutexvar_epi32(pick, w[0]);
      } else {
        s[i] = _mm512_permutex2var_epi32(w[0], pick, w[1]);
        if constexpr (L::kRegisters > 2) s[i] = _mm512_mask_permutexvar_epi32(s[i], L::kInThird[i], pick, w[2]);
        if constexpr (L::kRegisters > 3) s[i] = _mm512_mask_permutexvar_epi32(s[i], L::kInFourth[i], pick, w[3]);
      }
    }
  }
  // Vector v: 32 states, in the lanes that int8_matmul_windows.h describes.
  __m512i states(int v, const Controls<kK2>& controls) const {
    const __m512i control = controls.c[v];
    __m512i result = _mm512_multishift_epi64_epi8(control, s[L::kWindows.slot[v][0]]);
    if (L::kWindows.slot[v][1] != L::kWindows.slot[v][0]) {
      result = _mm512_mask_multishift_epi64_epi8(result, 0xF0F0F0F0F0F0F0F0ull, control, s[L::kWindows.slot[v][1]]);
    }
    return result;
  }
};

// The lower and upper 16 bits of state * multiplier. One 32-bit multiplication takes two operations for 16 states here;
// three 16-bit ones and an addition serve 32.
struct Product {
  __m512i low;
  __m512i high;

  explicit Product(__m512i states) {
    const __m512i multiplier_low = _mm512_set1_epi16(static_cast<int16_t>(kMul1Multiplier & 0xFFFF));
    const __m512i multiplier_high = _mm512_set1_epi16(static_cast<int16_t>(kMul1Multiplier >> 16));
    low = _mm512_mullo_epi16(states, multiplier_low);
    high = _mm512_add_epi16(_mm512_mulhi_epu16(states, multiplier_low), _mm512_mullo_epi16(states, multiplier_high));
  }
};

// Two accumulators (columns 0-7 and 8-15, even and odd dwords to be added) -> z of 16 columns.
inline void fold(__m512i half0, __m512i half1, int32_t centre, float scale, float* z) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  __m512i sum =
      _mm512_add_epi32(_mm512_permutex2var_epi32(half0, even, half1), _mm512_permutex2var_epi32(half0, odd, half1));
  sum = _mm512_sub_epi32(sum, _mm512_set1_epi32(centre));
  _mm512_storeu_ps(z, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(scale), _mm512_loadu_ps(z)));
}

// acc += products of unsigned bytes by signed ones (of int16), four (two) a dword. In assembly, because GCC 12 copies
// the accumulator before and after the intrinsic.
inline void add_bytes(__m512i& acc, __m512i u8, __m512i s8) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u8), "v"(s8));
}
inline void add_words(__m512i& acc, __m512i a, __m512i b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
}

inline __m512i quad(const uint64_t* p) {
  return _mm512_set1_epi64(static_cast<int64_t>(*p));
}

template <int kK2>
inline void prefetch(const uint16_t* tile) {
  for (int b = 0; b < 16 * kK2; b += 64) _mm_prefetch(reinterpret_cast<const char*>(tile) + b, _MM_HINT_T0);
}

template <int kK2, int kRows>
void bytes_of_rows(const TrellisView& view, const Int8Place& place, const Int8Rows& a, float* z) {
  const Controls<kK2> controls;
  const int64_t tile_row_words = view.n / kTile * tile_words(kK2);
  for (int ct = 0; ct < kTilesPerBlock; ++ct) {
    const uint16_t* tile = view.tile(place.chunk * kTilesPerChunk, place.block * kTilesPerBlock + ct);
    __m512i low[kRows][2], high[kRows][2];  // apart, so that no chain of additions is longer than the rest of the work
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      for (int h = 0; h < 2; ++h) low[r][h] = high[r][h] = _mm512_setzero_si512();
    }
    for (int rt = 0; rt < kTilesPerChunk; ++rt, tile += tile_row_words) {
      prefetch<kK2>(tile + place.next_words);
      const Slots<kK2> slots(tile);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const Product product(slots.states(v, controls));
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const __m512i x = quad(a.quads + r * kQuadsPerChunk + 4 * rt + v / 2);
          add_bytes(low[r][v % 2], product.low, x);
          add_bytes(high[r][v % 2], product.high, x);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      fold(_mm512_add_epi32(low[r][0], high[r][0]), _mm512_add_epi32(low[r][1], high[r][1]), a.centre[r], a.scale[r],
           z + r * kBlock + ct * kTile);
    }
  }
}

// Byte sums of the states, 32 a vector.
inline __m512i byte_sums(__m512i states) {
  const Product product(states);
  const __m512i ones = _mm512_set1_epi8(1);
  return _mm512_add_epi16(_mm512_maddubs_epi16(product.low, ones), _mm512_maddubs_epi16(product.high, ones));
}

template <int kK2, int kRows>
void words_of_rows(const TrellisView& view, const Int8Place& place, const Int8Rows& a, float* z) {
  const Controls<kK2> controls;
  const int64_t tile_row_words = view.n / kTile * tile_words(kK2);
  for (int ct = 0; ct < kTilesPerBlock; ++ct) {
    const uint16_t* tile = view.tile(place.chunk * kTilesPerChunk, place.block * kTilesPerBlock + ct);
    __m512i acc[kRows][2];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) acc[r][0] = acc[r][1] = _mm512_setzero_si512();
    for (int rt = 0; rt < kTilesPerChunk; ++rt, tile += tile_row_words) {
      prefetch<kK2>(tile + place.next_words);
      const Slots<kK2> slots(tile);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const __m512i sums = byte_sums(slots.states(v, controls));
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const __m512i x = quad(a.quads + r * kQuadsPerChunk + 4 * rt + v / 2);
          add_words(acc[r][v % 2], sums, x);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) fold(acc[r][0], acc[r][1], a.centre[r], a.scale[r], z + r * kBlock + ct * kTile);
  }
}

// kRows rows times the sums of one tile column of the chunk.
template <int kRows>
void multiply_sums(const __m512i* sums, const Int8Rows& a, int64_t first_row, float* z) {
  __m512i acc[kRows][2];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) acc[r][0] = acc[r][1] = _mm512_setzero_si512();
  const uint64_t* quads = a.quads + first_row * kQuadsPerChunk;
  for (int t = 0; t < kQuadsPerChunk; ++t) {
    const __m512i half0 = sums[2 * t];
    const __m512i half1 = sums[2 * t + 1];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m512i x = quad(quads + r * kQuadsPerChunk + t);
      add_words(acc[r][0], half0, x);
      add_words(acc[r][1], half1, x);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    fold(acc[r][0], acc[r][1], a.centre[first_row + r], a.scale[first_row + r], z + (first_row + r) * kBlock);
  }
}

template <int kK2>
void words_of_width(const TrellisView& view, const Int8Place& place, const Int8Rows& a, float* z) {
  switch (a.rows) {
    case 1:
      return words_of_rows<kK2, 1>(view, place, a, z);
    case 2:
      return words_of_rows<kK2, 2>(view, place, a, z);
    case 3:
      return words_of_rows<kK2, 3>(view, place, a, z);
    case 4:
      return words_of_rows<kK2, 4>(view, place, a, z);
    default:
      break;
  }
  const Controls<kK2> controls;
  const int64_t tile_row_words = view.n / kTile * tile_words(kK2);
  for (int ct = 0; ct < kTilesPerBlock; ++ct) {
    const uint16_t* tile = view.tile(place.chunk * kTilesPerChunk, place.block * kTilesPerBlock + ct);
    __m512i sums[kTilesPerChunk * kVectors];
    for (int rt = 0; rt < kTilesPerChunk; ++rt, tile += tile_row_words) {
      prefetch<kK2>(tile + place.next_words);
      const Slots<kK2> slots(tile);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[rt * kVectors + v] = byte_sums(slots.states(v, controls));
    }
    float* zc = z + ct * kTile;
    int64_t r = 0;
    for (; r + 8 <= a.rows; r += 8) multiply_sums<8>(sums, a, r, zc);
    switch (a.rows - r) {
      case 7:
        multiply_sums<7>(sums, a, r, zc);
        break;
      case 6:
        multiply_sums<6>(sums, a, r, zc);
        break;
      case 5:
        multiply_sums<5>(sums, a, r, zc);
        break;
      case 4:
        multiply_sums<4>(sums, a, r, zc);
        break;
      case 3:
        multiply_sums<3>(sums, a, r, zc);
        break;
      case 2:
        multiply_sums<2>(sums, a, r, zc);
        break;
      case 1:
        multiply_sums<1>(sums, a, r, zc);
        break;
      default:
        break;
    }
  }
}

void words(const TrellisView& view, const Int8Place& place, const Int8Rows& a, float* z) {
  with_width(view.k2, [&]<int kK2>() { words_of_width<kK2>(view, place, a, z); });
}

void bytes(const TrellisView& view, const Int8Place& place, const Int8Rows& a, float* z) {
  with_width(view.k2, [&]<int kK2>() {
    if (a.rows == 1) return bytes_of_rows<kK2, 1>(view, place, a, z);
    bytes_of_rows<kK2, 2>(view, place, a, z);
  });
}

}  // namespace

const Int8Kernels& int8_kernels_avx512() {
  static constexpr Int8Kernels kKernels = {words, bytes, 2, Int8Form::kPlainBytes, quantize_rows, rotate_rows};
  return kKernels;
}

}  // namespace espalier::codec
