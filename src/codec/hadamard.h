// Block-diagonal Hadamard rotation with 128x128 Sylvester blocks: H[r][c] = (-1)^popcount(r & c) / sqrt(128).
//
// Symmetric and orthogonal, so it is its own inverse. Computed as seven butterfly stages with distances 1, 2, 4, ... 64 in
// this order, adds only, then one multiplication by the normalising constant: the same bits on every machine and tier.
// Source: docs/formats/exl3.md, "Reconstruction".
#pragma once

#include <cstdint>

namespace espalier::codec {

inline constexpr float kHadamardScale = 0.088388347648f;           // 1/sqrt(128) in float
inline constexpr double kHadamardScaleF64 = 0.08838834764831844055;  // and in double

// v [128]: in place, without the normalising constant.
void hadamard128_sum(float* v);
void hadamard128_sum(double* v);

// a [rows, cols] row-major, in place, every 128-chunk of every row; cols % 128 == 0. Normalised (1/sqrt(128) in the type).
void hadamard_along_rows(float* a, int64_t rows, int64_t cols);
void hadamard_along_rows(double* a, int64_t rows, int64_t cols);
// The same along columns (every 128-chunk of every column); rows % 128 == 0.
void hadamard_along_columns(double* a, int64_t rows, int64_t cols);

}  // namespace espalier::codec
