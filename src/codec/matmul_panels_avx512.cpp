// GCC 12's own AVX-512 header reads a deliberately undefined operand of an unmasked operation.
#pragma GCC diagnostic ignored "-Wuninitialized"

#include "codec/matmul_panels.h"

#include <immintrin.h>

namespace espalier::codec {
namespace {

constexpr uint32_t k3InstMultiplier = 89226354u;
constexpr uint32_t k3InstAddend = 64248484u;

// A tile's words in registers: 8 to 64 of them, 16 a register.
template <int kRegisters>
struct TileWords {
  __m512i w[kRegisters];

  TileWords(const uint16_t* tile, int n_words) {
    for (int i = 0; i < kRegisters; ++i) {
      const int left = n_words - 16 * i;  // K = 5 uses two and a half of four registers
      const uint32_t mask = left >= 16 ? 0xFFFFu : left > 0 ? (1u << left) - 1 : 0u;
      w[i] = _mm512_maskz_loadu_epi32(static_cast<__mmask16>(mask), tile + (left > 0 ? 32 * i : 0));
    }
  }
  __m512i pick(__m512i index) const {
    if constexpr (kRegisters == 1) return _mm512_permutexvar_epi32(index, w[0]);
    if constexpr (kRegisters == 2) return _mm512_permutex2var_epi32(w[0], index, w[1]);
    if constexpr (kRegisters == 4) {
      const __m512i lower = _mm512_permutex2var_epi32(w[0], index, w[1]);
      const __m512i upper = _mm512_permutex2var_epi32(w[2], index, w[3]);
      return _mm512_mask_blend_epi32(_mm512_test_epi32_mask(index, _mm512_set1_epi32(32)), lower, upper);
    }
  }
};

// 16 states -> 16 values, each rounded to fp16 once.
template <Codebook kCodebook>
__m512 values_of(__m512i states) {
  __m512 exact;
  if constexpr (kCodebook == Codebook::kMul1) {
    const __m512i product = _mm512_mullo_epi32(states, _mm512_set1_epi32(static_cast<int>(kMul1Multiplier)));
    const __m512i sum = _mm512_dpbusd_epi32(_mm512_set1_epi32(1024), product, _mm512_set1_epi8(1));
    const __m512 slope = _mm512_set1_ps(0.00676727294921875f);  // fp16 0x1EEE
    const __m512 offset = _mm512_set1_ps(-10.3828125f);         // fp16 0xC931
    exact = _mm512_add_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), slope), offset);
  } else {
    const uint32_t multiplier = kCodebook == Codebook::kMcg ? kMcgMultiplier : k3InstMultiplier;
    __m512i x = _mm512_mullo_epi32(states, _mm512_set1_epi32(static_cast<int>(multiplier)));
    if constexpr (kCodebook == Codebook::k3Inst) x = _mm512_add_epi32(x, _mm512_set1_epi32(static_cast<int>(k3InstAddend)));
    x = _mm512_xor_si512(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0x8FFF8FFFu))),
                         _mm512_set1_epi32(0x3B603B60));
    const __m512 low = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x));
    const __m512 high = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16)));
    exact = _mm512_add_ps(low, high);
  }
  return _mm512_cvtph_ps(_mm512_cvtps_ph(exact, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

template <Codebook kCodebook, int kRegisters>
void decode(const TrellisView& view, int64_t panel_row, int64_t panel_column, float* panel) {
  const WindowTable& table = window_table(view.k2);
  const __m512i low16 = _mm512_set1_epi32(0xFFFF);
  const __m512i word_bits = _mm512_set1_epi32(32);
  for (int rt = 0; rt < kPanelRows / kTile; ++rt) {
    for (int ct = 0; ct < kPanelColumns / kTile; ++ct) {
      const TileWords<kRegisters> words(
          view.tile(panel_row * (kPanelRows / kTile) + rt, panel_column * (kPanelColumns / kTile) + ct), 4 * view.k2);
      float* corner = panel + rt * kTile * kPanelColumns + ct * kTile;
      for (int r = 0; r < kTile; ++r) {
        const WindowTable::Row& row = table.rows[r];
        const __m512i high = words.pick(_mm512_load_si512(row.high));
        const __m512i low = words.pick(_mm512_load_si512(row.low));
        const __m512i shift = _mm512_load_si512(row.shift);
        const __m512i window =
            _mm512_or_si512(_mm512_sllv_epi32(high, _mm512_sub_epi32(word_bits, shift)), _mm512_srlv_epi32(low, shift));
        _mm512_storeu_ps(corner + r * kPanelColumns, values_of<kCodebook>(_mm512_and_si512(window, low16)));
      }
    }
  }
}

template <Codebook kCodebook>
void decode_width(const TrellisView& view, int64_t panel_row, int64_t panel_column, float* panel) {
  if (view.k2 <= 4) return decode<kCodebook, 1>(view, panel_row, panel_column, panel);
  if (view.k2 <= 8) return decode<kCodebook, 2>(view, panel_row, panel_column, panel);
  decode<kCodebook, 4>(view, panel_row, panel_column, panel);
}

void decode_panel(const TrellisView& view, int64_t panel_row, int64_t panel_column, float* panel) {
  switch (view.codebook) {
    case Codebook::k3Inst: return decode_width<Codebook::k3Inst>(view, panel_row, panel_column, panel);
    case Codebook::kMcg: return decode_width<Codebook::kMcg>(view, panel_row, panel_column, panel);
    case Codebook::kMul1: return decode_width<Codebook::kMul1>(view, panel_row, panel_column, panel);
  }
}

// kRows rows of x times kVectors*16 columns, accumulators in registers.
template <int kRows, int kVectors>
void multiply_block(const float* panel, const float* xh, int64_t x_stride, float* z) {
  __m512 sum[kRows][kVectors];
  for (int t = 0; t < kRows; ++t) {
    for (int v = 0; v < kVectors; ++v) sum[t][v] = _mm512_loadu_ps(z + t * kPanelColumns + 16 * v);
  }
  for (int r = 0; r < kPanelRows; ++r) {
    __m512 w[kVectors];
    for (int v = 0; v < kVectors; ++v) w[v] = _mm512_loadu_ps(panel + r * kPanelColumns + 16 * v);
    for (int t = 0; t < kRows; ++t) {
      const __m512 x = _mm512_set1_ps(xh[t * x_stride + r]);
      for (int v = 0; v < kVectors; ++v) sum[t][v] = _mm512_fmadd_ps(x, w[v], sum[t][v]);
    }
  }
  for (int t = 0; t < kRows; ++t) {
    for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(z + t * kPanelColumns + 16 * v, sum[t][v]);
  }
}

void multiply_panel(const float* panel, const float* xh, int64_t x_stride, int64_t rows, float* z) {
  int64_t t = 0;
  for (; t + 4 <= rows; t += 4) {
    multiply_block<4, 4>(panel, xh + t * x_stride, x_stride, z + t * kPanelColumns);
    multiply_block<4, 4>(panel + 64, xh + t * x_stride, x_stride, z + t * kPanelColumns + 64);
  }
  for (; t < rows; ++t) multiply_block<1, 8>(panel, xh + t * x_stride, x_stride, z + t * kPanelColumns);
}

}  // namespace

const PanelKernels& panel_kernels_avx512() {
  static constexpr PanelKernels kKernels = {decode_panel, multiply_panel};
  return kKernels;
}

}  // namespace espalier::codec
