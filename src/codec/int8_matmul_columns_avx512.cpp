// GCC 12's own AVX-512 header reads a deliberately undefined operand of an unmasked operation.
#pragma GCC diagnostic ignored "-Wuninitialized"

#include <immintrin.h>

#include <array>

#include "codec/int8_matmul_columns.h"
#include "codec/int8_matmul_kernels.h"
#include "codec/int8_matmul_rows_impl.h"
#include "codec/int8_matmul_windows.h"

// For cores where a 32-bit multiplication costs what a 16-bit one does and shifts have pipes of their own (Zen 4):
// shift, mask, multiply and sum of bytes, 16 states each, against one multishift, three multiplications and two sums
// for 32. The numbers are in docs/decisions/codec-int8-products.md.

namespace espalier::codec {
namespace {

constexpr int kTilesPerBlock = kBlock / kTile;  // along n
constexpr int kTilesPerChunk = kChunk / kTile;  // along k
constexpr int kTurns = ColumnWindows::kTurns;
constexpr int kPairs = kTurns / 2;

template <int kK2>
struct Layout {
  static constexpr ColumnWindows kWindows = make_column_windows(kK2);
  static constexpr int kRegisters = (kWindows.n_bytes + 63) / 64;
  static constexpr int kTurnsPerGather = kTurns / kWindows.n_gathers;

  using Pick = std::array<std::array<uint8_t, 64>, ColumnWindows::kMaxGathers>;
  static constexpr Pick make_pick() {
    Pick pick{};
    for (int g = 0; g < kWindows.n_gathers; ++g) {
      for (int i = 0; i < 64; ++i) pick[g][i] = kWindows.byte[g][i];
    }
    return pick;
  }
  // Bytes from the third register on.
  using Masks = std::array<uint64_t, ColumnWindows::kMaxGathers>;
  static constexpr Masks make_masks() {
    Masks masks{};
    for (int g = 0; g < kWindows.n_gathers; ++g) {
      for (int i = 0; i < 64; ++i) masks[g] |= static_cast<uint64_t>(kWindows.byte[g][i] >= 128 ? 1 : 0) << i;
    }
    return masks;
  }
  using Shift = std::array<std::array<int32_t, 16>, kTurns>;
  static constexpr Shift make_shift() {
    Shift shift{};
    for (int t = 0; t < kTurns; ++t) {
      for (int c = 0; c < 16; ++c) shift[t][c] = kWindows.below[t][c];
    }
    return shift;
  }
  // The first turn that is shifted like this one: with whole bits four are enough, which stay in registers.
  using Same = std::array<int, kTurns>;
  static constexpr Same make_same() {
    Same same{};
    for (int t = 0; t < kTurns; ++t) {
      same[t] = t;
      for (int s = t - 1; s >= 0; --s) {
        bool equal = true;
        for (int c = 0; c < 16; ++c) equal = equal && kWindows.below[s][c] == kWindows.below[t][c];
        if (equal) same[t] = s;
      }
    }
    return same;
  }

  alignas(64) static constexpr Pick kPick = make_pick();
  alignas(64) static constexpr Shift kShift = make_shift();
  static constexpr Masks kIsUpper = make_masks();
  static constexpr Same kSame = make_same();
};

// A tile's bytes, gathered.
template <int kK2>
struct Gathers {
  using L = Layout<kK2>;
  __m512i g[L::kWindows.n_gathers];

  explicit Gathers(const uint16_t* tile) {
    constexpr int kRest = L::kWindows.n_bytes % 64;
    __m512i w[L::kRegisters];
    for (int r = 0; r < L::kRegisters; ++r) {
      if (r == L::kRegisters - 1 && kRest != 0) {
        w[r] = _mm512_maskz_loadu_epi32((1u << (kRest / 4)) - 1, tile + 32 * r);
      } else {
        w[r] = _mm512_loadu_si512(tile + 32 * r);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < L::kWindows.n_gathers; ++i) {
      const __m512i pick = _mm512_load_si512(L::kPick[i].data());
      if constexpr (L::kRegisters == 1) {
        g[i] = _mm512_permutexvar_epi8(pick, w[0]);
      } else {
        g[i] = _mm512_permutex2var_epi8(w[0], pick, w[1]);
        if constexpr (L::kRegisters == 3) g[i] = _mm512_mask_permutexvar_epi8(g[i], L::kIsUpper[i], pick, w[2]);
        if constexpr (L::kRegisters == 4) {
          g[i] = _mm512_mask_mov_epi8(g[i], L::kIsUpper[i], _mm512_permutex2var_epi8(w[2], pick, w[3]));
        }
      }
    }
  }
  // state * multiplier of every column.
  __m512i products(int turn) const {
    __m512i state = g[turn / L::kTurnsPerGather];
    if (!L::kWindows.is_aligned(turn)) {
      state = _mm512_srlv_epi32(state, _mm512_load_si512(L::kShift[L::kSame[turn]].data()));
    }
    if (L::kWindows.has_above[turn]) state = _mm512_and_si512(state, _mm512_set1_epi32(0xFFFF));
    return _mm512_mullo_epi32(state, _mm512_set1_epi32(static_cast<int32_t>(kMul1Multiplier)));
  }
  // Byte sums of two turns, the first in the lower halves.
  __m512i sums(int pair) const {
    const __m512i ones = _mm512_set1_epi8(1);
    __m512i sum = _mm512_setzero_si512();
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(products(2 * pair + 1)), "v"(ones));
    sum = _mm512_slli_epi32(sum, 16);
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(products(2 * pair)), "v"(ones));
    return sum;
  }
};

// Sums of one row -> z of 16 columns.
inline void fold(__m512i sum, int32_t centre, float scale, float* z) {
  sum = _mm512_sub_epi32(sum, _mm512_set1_epi32(centre));
  _mm512_storeu_ps(z, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(scale), _mm512_loadu_ps(z)));
}

// acc += products of unsigned bytes by signed ones (of int16), the second operand one dword for all lanes. In assembly,
// because GCC 12 copies the accumulator before and after the intrinsic.
inline void add_bytes(__m512i& acc, __m512i u8, const int32_t* s8) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(u8), "m"(*s8));
}
inline void add_words(__m512i& acc, __m512i a, const int32_t* b) {
  asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(a), "m"(*b));
}

template <int kK2>
inline void prefetch(const uint16_t* tile) {
  for (int b = 0; b < 16 * kK2; b += 64) _mm_prefetch(reinterpret_cast<const char*>(tile) + b, _MM_HINT_T0);
}

template <int kK2>
void bytes_of_row(const TrellisView& view, const Int8Place& place, const Int8Rows& a, float* z) {
  const int64_t tile_row_words = view.n / kTile * tile_words(kK2);
  for (int ct = 0; ct < kTilesPerBlock; ++ct) {
    const uint16_t* tile = view.tile(place.chunk * kTilesPerChunk, place.block * kTilesPerBlock + ct);
    const auto* x = reinterpret_cast<const int32_t*>(a.quads);
    __m512i acc[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int rt = 0; rt < kTilesPerChunk; ++rt, tile += tile_row_words, x += kTurns) {
      prefetch<kK2>(tile + place.next_words);
      const Gathers<kK2> gathers(tile);
#pragma GCC unroll 16
      for (int turn = 0; turn < kTurns; ++turn) add_bytes(acc[turn % 2], gathers.products(turn), x + turn);
    }
    fold(_mm512_add_epi32(acc[0], acc[1]), a.centre[0], a.scale[0], z + ct * kTile);
  }
}

template <int kK2, int kRows>
void words_of_rows(const TrellisView& view, const Int8Place& place, const Int8Rows& a, float* z) {
  const int64_t tile_row_words = view.n / kTile * tile_words(kK2);
  for (int ct = 0; ct < kTilesPerBlock; ++ct) {
    const uint16_t* tile = view.tile(place.chunk * kTilesPerChunk, place.block * kTilesPerBlock + ct);
    const auto* x = reinterpret_cast<const int32_t*>(a.quads);
    __m512i acc[kRows][2];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) acc[r][0] = acc[r][1] = _mm512_setzero_si512();
    for (int rt = 0; rt < kTilesPerChunk; ++rt, tile += tile_row_words, x += kPairs) {
      prefetch<kK2>(tile + place.next_words);
      const Gathers<kK2> gathers(tile);
#pragma GCC unroll 8
      for (int pair = 0; pair < kPairs; ++pair) {
        const __m512i sums = gathers.sums(pair);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) add_words(acc[r][pair % 2], sums, x + r * 2 * kQuadsPerChunk + pair);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      fold(_mm512_add_epi32(acc[r][0], acc[r][1]), a.centre[r], a.scale[r], z + r * kBlock + ct * kTile);
    }
  }
}

// kRows rows times the sums of one tile column of the chunk.
template <int kRows>
void multiply_sums(const __m512i* sums, const Int8Rows& a, int64_t first_row, float* z) {
  constexpr int kChains =
      kRows < 4 ? 2 : 1;  // apart, so that no chain of additions is longer than the rest of the work
  __m512i acc[kRows][kChains];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kChains; ++c) acc[r][c] = _mm512_setzero_si512();
  }
  const auto* x = reinterpret_cast<const int32_t*>(a.quads + first_row * kQuadsPerChunk);
  for (int j = 0; j < 2 * kQuadsPerChunk; j += 2) {
#pragma GCC unroll 2
    for (int i = j; i < j + 2; ++i) {
      const __m512i sum = sums[i];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) add_words(acc[r][i % kChains], sum, x + r * 2 * kQuadsPerChunk + i);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    __m512i sum = acc[r][0];
    if constexpr (kChains == 2) sum = _mm512_add_epi32(sum, acc[r][1]);
    fold(sum, a.centre[first_row + r], a.scale[first_row + r], z + (first_row + r) * kBlock);
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
  const int64_t tile_row_words = view.n / kTile * tile_words(kK2);
  for (int ct = 0; ct < kTilesPerBlock; ++ct) {
    const uint16_t* tile = view.tile(place.chunk * kTilesPerChunk, place.block * kTilesPerBlock + ct);
    __m512i sums[kTilesPerChunk * kPairs];
    for (int rt = 0; rt < kTilesPerChunk; ++rt, tile += tile_row_words) {
      prefetch<kK2>(tile + place.next_words);
      const Gathers<kK2> gathers(tile);
#pragma GCC unroll 8
      for (int pair = 0; pair < kPairs; ++pair) sums[rt * kPairs + pair] = gathers.sums(pair);
    }
    float* zc = z + ct * kTile;
    int64_t r = 0;
    for (; r + 8 <= a.rows; r += 8) multiply_sums<8>(sums, a, r, zc);
    if (r + 4 <= a.rows) {
      multiply_sums<4>(sums, a, r, zc);
      r += 4;
    }
    if (r + 2 <= a.rows) {
      multiply_sums<2>(sums, a, r, zc);
      r += 2;
    }
    if (r < a.rows) multiply_sums<1>(sums, a, r, zc);
  }
}

void words(const TrellisView& view, const Int8Place& place, const Int8Rows& a, float* z) {
  with_width(view.k2, [&]<int kK2>() { words_of_width<kK2>(view, place, a, z); });
}

void bytes(const TrellisView& view, const Int8Place& place, const Int8Rows& a, float* z) {
  with_width(view.k2, [&]<int kK2>() { bytes_of_row<kK2>(view, place, a, z); });
}

}  // namespace

const Int8Kernels& int8_kernels_columns_avx512() {
  static constexpr Int8Kernels kKernels = {words, bytes, 1, Int8Form::kPlainSplats, quantize_rows, rotate_rows};
  return kKernels;
}

}  // namespace espalier::codec
