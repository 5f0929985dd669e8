#include <immintrin.h>

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

// Half a vector of int8_matmul_windows.h is a register here: g = 0 holds lanes 0-3, g = 1 lanes 4-7.
template <int kK2>
struct Layout {
  static constexpr RingWindows kWindows = make_ring_windows(kK2);

  // Two neighbouring states, 16 + K bits, lie in the 32 bits from some byte of their pair of words on: `bytes` moves
  // these to a dword, `right` brings the first state to its lower half, `left` the second to its upper half.
  struct Cut {
    alignas(32) std::array<uint8_t, 32> bytes;
    alignas(32) std::array<int32_t, 8> right;
    alignas(32) std::array<int32_t, 8> left;
  };
  using Cuts = std::array<std::array<Cut, 2>, kVectors>;
  static constexpr Cuts make_cuts() {
    Cuts cuts{};
    for (int v = 0; v < kVectors; ++v) {
      for (int d = 0; d < 16; ++d) {  // dword of the whole vector
        const int lane = d / 2;
        const int first = kWindows.below[v][lane][2 * (d % 2)];
        const int second = kWindows.below[v][lane][2 * (d % 2) + 1];
        const int byte = second / 8 < 4 ? second / 8 : 4;
        Cut& cut = cuts[v][d / 8];
        // The register has w[j] above w[j-1], the ring the other way round.
        for (int b = 0; b < 4; ++b)
          cut.bytes[4 * (d % 8) + b] = static_cast<uint8_t>(8 * (lane % 2) + (byte + b + 4) % 8);
        cut.right[d % 8] = first - 8 * byte;
        cut.left[d % 8] = 16 - (second - 8 * byte);
      }
    }
    return cuts;
  }
  static constexpr Cuts kCuts = make_cuts();
};

// The pair (w[j-1], w[j]) of a tile.
template <int kK2>
inline int64_t pair_at(const uint16_t* tile, int j) {
  uint64_t pair;
  if (j > 0) {
    std::memcpy(&pair, tile + 2 * (j - 1), sizeof pair);
  } else {
    uint32_t first, last;
    std::memcpy(&first, tile, sizeof first);
    std::memcpy(&last, tile + 2 * (4 * kK2 - 1), sizeof last);
    pair = static_cast<uint64_t>(first) << 32 | last;
  }
  return static_cast<int64_t>(pair);
}

inline __m256i load(const void* p) {
  return _mm256_load_si256(static_cast<const __m256i*>(p));
}

// sums [64 vectors, 32]:i16 = byte sums of one tile column of the chunk.
template <int kK2>
void decode_sums(const uint16_t* tile, int64_t tile_row_words, int64_t next_words, int16_t* sums) {
  using L = Layout<kK2>;
  const __m256i multiplier_low = _mm256_set1_epi16(static_cast<int16_t>(kMul1Multiplier & 0xFFFF));
  const __m256i multiplier_high = _mm256_set1_epi16(static_cast<int16_t>(kMul1Multiplier >> 16));
  const __m256i ones = _mm256_set1_epi8(1);
  for (int rt = 0; rt < kTilesPerChunk; ++rt, tile += tile_row_words) {
    const char* next = reinterpret_cast<const char*>(tile + next_words);
    for (int b = 0; b < 16 * kK2; b += 64) _mm_prefetch(next + b, _MM_HINT_T0);
#pragma GCC unroll 2
    for (int g = 0; g < 2; ++g) {
      __m256i slots[RingWindows::kMaxSlots];
#pragma GCC unroll 8
      for (int s = 0; s < L::kWindows.n_slots; ++s) {
        const int* word = L::kWindows.word[s] + 4 * g;
        slots[s] = _mm256_set_epi64x(pair_at<kK2>(tile, word[3]), pair_at<kK2>(tile, word[2]),
                                     pair_at<kK2>(tile, word[1]), pair_at<kK2>(tile, word[0]));
      }
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const auto& cut = L::kCuts[v][g];
        __m256i source = slots[L::kWindows.slot[v][0]];
        __m256i bits = _mm256_shuffle_epi8(source, load(cut.bytes.data()));
        if (L::kWindows.slot[v][1] != L::kWindows.slot[v][0]) {
          const __m256i upper = _mm256_shuffle_epi8(slots[L::kWindows.slot[v][1]], load(cut.bytes.data()));
          bits = _mm256_blend_epi32(bits, upper, 0xAA);
        }
        const __m256i states = _mm256_blend_epi16(_mm256_srlv_epi32(bits, load(cut.right.data())),
                                                  _mm256_sllv_epi32(bits, load(cut.left.data())), 0xAA);
        const __m256i low = _mm256_mullo_epi16(states, multiplier_low);
        const __m256i high =
            _mm256_add_epi16(_mm256_mulhi_epu16(states, multiplier_low), _mm256_mullo_epi16(states, multiplier_high));
        const __m256i sum = _mm256_add_epi16(_mm256_maddubs_epi16(low, ones), _mm256_maddubs_epi16(high, ones));
        _mm256_store_si256(reinterpret_cast<__m256i*>(sums + (rt * kVectors + v) * 32 + 16 * g), sum);
      }
    }
  }
}

// Four outputs: T = sum - centre (mod 2^32), z = fma(T, scale, z).
inline void fold4(__m128i sum, __m128i centre, __m128 scale, float* z) {
  _mm_storeu_ps(z, _mm_fmadd_ps(_mm_cvtepi32_ps(_mm_sub_epi32(sum, centre)), scale, _mm_loadu_ps(z)));
}

template <int kRows>
void multiply_sums(const int16_t* sums, const Int8Rows& a, int64_t first_row, float* z) {
  const uint64_t* quads = a.quads + first_row * kQuadsPerChunk;
  for (int g = 0; g < 2; ++g) {
    __m256i acc[kRows][2];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
    for (int t = 0; t < kQuadsPerChunk; ++t) {
      const __m256i half0 = load(sums + 64 * t + 16 * g);
      const __m256i half1 = load(sums + 64 * t + 32 + 16 * g);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const __m256i x = _mm256_set1_epi64x(static_cast<int64_t>(quads[r * kQuadsPerChunk + t]));
        acc[r][0] = _mm256_add_epi32(acc[r][0], _mm256_madd_epi16(half0, x));
        acc[r][1] = _mm256_add_epi32(acc[r][1], _mm256_madd_epi16(half1, x));
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {  // even and odd dwords belong to one column
      const __m256i pairs = _mm256_permute4x64_epi64(_mm256_hadd_epi32(acc[r][0], acc[r][1]), 0xD8);
      const __m128i centre = _mm_set1_epi32(a.centre[first_row + r]);
      const __m128 scale = _mm_set1_ps(a.scale[first_row + r]);
      float* zr = z + (first_row + r) * kBlock + 4 * g;
      fold4(_mm256_castsi256_si128(pairs), centre, scale, zr);
      fold4(_mm256_extracti128_si256(pairs, 1), centre, scale, zr + 8);
    }
  }
}

void words(const TrellisView& view, const Int8Place& place, const Int8Rows& a, float* z) {
  const int64_t tile_row_words = view.n / kTile * tile_words(view.k2);
  for (int ct = 0; ct < kTilesPerBlock; ++ct) {
    const uint16_t* tile = view.tile(place.chunk * kTilesPerChunk, place.block * kTilesPerBlock + ct);
    alignas(32) int16_t sums[kChunk * kTile];
    with_width(view.k2, [&]<int kK2>() { decode_sums<kK2>(tile, tile_row_words, place.next_words, sums); });
    float* zc = z + ct * kTile;
    int64_t r = 0;
    for (; r + 4 <= a.rows; r += 4) multiply_sums<4>(sums, a, r, zc);
    switch (a.rows - r) {
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

}  // namespace

const Int8Kernels& int8_kernels_avx2() {
  static constexpr Int8Kernels kKernels = {words, nullptr, 0, Int8Form::kPlainBytes, quantize_rows, rotate_rows};
  return kKernels;
}

}  // namespace espalier::codec
