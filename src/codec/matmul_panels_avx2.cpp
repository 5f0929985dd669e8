#include "codec/matmul_panels.h"

#include <immintrin.h>

namespace espalier::codec {
namespace {

constexpr uint32_t k3InstMultiplier = 89226354u;
constexpr uint32_t k3InstAddend = 64248484u;

// The lower 16 bits of eight 32-bit lanes, packed.
__m128i lower_halves(__m256i x) {
  const __m256i masked = _mm256_and_si256(x, _mm256_set1_epi32(0xFFFF));
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(masked, masked), 0x08);
  return _mm256_castsi256_si128(packed);
}

// 8 states -> 8 values, each rounded to fp16 once.
template <Codebook kCodebook>
__m256 values_of(__m256i states) {
  __m256 exact;
  if constexpr (kCodebook == Codebook::kMul1) {
    const __m256i product = _mm256_mullo_epi32(states, _mm256_set1_epi32(static_cast<int>(kMul1Multiplier)));
    const __m256i pairs = _mm256_maddubs_epi16(product, _mm256_set1_epi8(1));  // at most 510, no saturation
    const __m256i sum = _mm256_add_epi32(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)), _mm256_set1_epi32(1024));
    const __m256 slope = _mm256_set1_ps(0.00676727294921875f);  // fp16 0x1EEE
    const __m256 offset = _mm256_set1_ps(-10.3828125f);         // fp16 0xC931
    exact = _mm256_add_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(sum), slope), offset);
  } else {
    const uint32_t multiplier = kCodebook == Codebook::kMcg ? kMcgMultiplier : k3InstMultiplier;
    __m256i x = _mm256_mullo_epi32(states, _mm256_set1_epi32(static_cast<int>(multiplier)));
    if constexpr (kCodebook == Codebook::k3Inst) x = _mm256_add_epi32(x, _mm256_set1_epi32(static_cast<int>(k3InstAddend)));
    x = _mm256_xor_si256(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0x8FFF8FFFu))),
                         _mm256_set1_epi32(0x3B603B60));
    exact = _mm256_add_ps(_mm256_cvtph_ps(lower_halves(x)), _mm256_cvtph_ps(lower_halves(_mm256_srli_epi32(x, 16))));
  }
  return _mm256_cvtph_ps(_mm256_cvtps_ph(exact, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

template <Codebook kCodebook>
void decode(const TrellisView& view, int64_t panel_row, int64_t panel_column, float* panel) {
  const WindowTable& table = window_table(view.k2);
  const __m256i low16 = _mm256_set1_epi32(0xFFFF);
  const __m256i word_bits = _mm256_set1_epi32(32);
  for (int rt = 0; rt < kPanelRows / kTile; ++rt) {
    for (int ct = 0; ct < kPanelColumns / kTile; ++ct) {
      const int* words = reinterpret_cast<const int*>(
          view.tile(panel_row * (kPanelRows / kTile) + rt, panel_column * (kPanelColumns / kTile) + ct));
      float* corner = panel + rt * kTile * kPanelColumns + ct * kTile;
      for (int r = 0; r < kTile; ++r) {
        const WindowTable::Row& row = table.rows[r];
        for (int c = 0; c < kTile; c += 8) {
          const __m256i high =
              _mm256_i32gather_epi32(words, _mm256_load_si256(reinterpret_cast<const __m256i*>(row.high + c)), 4);
          const __m256i low = _mm256_i32gather_epi32(words, _mm256_load_si256(reinterpret_cast<const __m256i*>(row.low + c)), 4);
          const __m256i shift = _mm256_load_si256(reinterpret_cast<const __m256i*>(row.shift + c));
          const __m256i window = _mm256_or_si256(_mm256_sllv_epi32(high, _mm256_sub_epi32(word_bits, shift)),
                                                 _mm256_srlv_epi32(low, shift));
          _mm256_storeu_ps(corner + r * kPanelColumns + c, values_of<kCodebook>(_mm256_and_si256(window, low16)));
        }
      }
    }
  }
}

void decode_panel(const TrellisView& view, int64_t panel_row, int64_t panel_column, float* panel) {
  switch (view.codebook) {
    case Codebook::k3Inst: return decode<Codebook::k3Inst>(view, panel_row, panel_column, panel);
    case Codebook::kMcg: return decode<Codebook::kMcg>(view, panel_row, panel_column, panel);
    case Codebook::kMul1: return decode<Codebook::kMul1>(view, panel_row, panel_column, panel);
  }
}

// kRows rows of x times kVectors*8 columns, accumulators in registers.
template <int kRows, int kVectors>
void multiply_block(const float* panel, const float* xh, int64_t x_stride, float* z) {
  __m256 sum[kRows][kVectors];
  for (int t = 0; t < kRows; ++t) {
    for (int v = 0; v < kVectors; ++v) sum[t][v] = _mm256_loadu_ps(z + t * kPanelColumns + 8 * v);
  }
  for (int r = 0; r < kPanelRows; ++r) {
    __m256 w[kVectors];
    for (int v = 0; v < kVectors; ++v) w[v] = _mm256_loadu_ps(panel + r * kPanelColumns + 8 * v);
    for (int t = 0; t < kRows; ++t) {
      const __m256 x = _mm256_set1_ps(xh[t * x_stride + r]);
      for (int v = 0; v < kVectors; ++v) sum[t][v] = _mm256_fmadd_ps(x, w[v], sum[t][v]);
    }
  }
  for (int t = 0; t < kRows; ++t) {
    for (int v = 0; v < kVectors; ++v) _mm256_storeu_ps(z + t * kPanelColumns + 8 * v, sum[t][v]);
  }
}

void multiply_panel(const float* panel, const float* xh, int64_t x_stride, int64_t rows, float* z) {
  int64_t t = 0;
  for (; t + 4 <= rows; t += 4) {
    for (int c = 0; c < kPanelColumns; c += 16) {
      multiply_block<4, 2>(panel + c, xh + t * x_stride, x_stride, z + t * kPanelColumns + c);
    }
  }
  for (; t < rows; ++t) {
    for (int c = 0; c < kPanelColumns; c += 64) {
      multiply_block<1, 8>(panel + c, xh + t * x_stride, x_stride, z + t * kPanelColumns + c);
    }
  }
}

}  // namespace

const PanelKernels& panel_kernels_avx2() {
  static constexpr PanelKernels kKernels = {decode_panel, multiply_panel};
  return kKernels;
}

}  // namespace espalier::codec
