// The inner loops of exl3_matmul, one set per instruction set; internal to the codec. All sets give the same bits.
#pragma once

#include <cstdint>

#include "base/simd_tier.h"
#include "codec/trellis.h"

namespace espalier::codec {

inline constexpr int kPanelRows = 32;      // rows of k decoded at a time: two tile rows
inline constexpr int kPanelColumns = 128;  // one Hadamard block of outputs

// Where the 16 columns of one tile row find their windows: state = (word[high] : word[low]) >> shift, lower 16 bits.
struct WindowTable {
  struct Row {
    alignas(64) int32_t high[kTile];
    alignas(64) int32_t low[kTile];
    alignas(64) int32_t shift[kTile];
  };
  Row rows[kTile];
};

// Shared, built once per width.
const WindowTable& window_table(int k2);

struct PanelKernels {
  // panel [32, 128]:f32 = codebook values of rows 32*panel_row.. and columns 128*panel_column.. of the matrix.
  void (*decode)(const TrellisView& view, int64_t panel_row, int64_t panel_column, float* panel);
  // z [rows, 128] (stride 128) += xh [rows, 32] (stride x_stride) times the panel; one FMA chain per element, k ascending.
  void (*multiply)(const float* panel, const float* xh, int64_t x_stride, int64_t rows, float* z);
};

const PanelKernels& panel_kernels_portable();
const PanelKernels& panel_kernels_avx2();
const PanelKernels& panel_kernels_avx512();

}  // namespace espalier::codec
