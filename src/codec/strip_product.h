// The fp64 product behind the quantizer: a row-major matrix times a strip of 16 columns. Internal.
//
// Every output is one chain, `sum = sum + a * b` with both operations rounded, over ascending j. Vectors work across
// the 16 columns only, so the portable loop and every tier give the same bits.
#pragma once

#include <cstdint>

#include "base/simd_tier.h"

namespace espalier::codec {

inline constexpr int kStripWidth = 16;

struct StripProduct {
  const double* a = nullptr;  // [rows, cols], row i at a + i * a_stride
  int64_t a_stride = 0;
  const double* strip = nullptr;  // [cols, 16]
  double* out = nullptr;          // [rows, 16], row i at out + i * out_stride; does not overlap the inputs
  int64_t out_stride = kStripWidth;
  int64_t rows = 0;
  int64_t cols = 0;
  bool add = false;  // chains start from what `out` holds instead of 0
};

void strip_product(const StripProduct& product, SimdTier tier);

// The tiers.
void strip_product_baseline(const StripProduct& product);
void strip_product_avx2(const StripProduct& product);
void strip_product_avx512(const StripProduct& product);

}  // namespace espalier::codec
