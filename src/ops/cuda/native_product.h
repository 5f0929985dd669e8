// y = x W on a GPU with a native weight and sums that many threads share (Order::kFast): for a few rows, bound by reading W.
//
// An output is the sum of as many slices of k as `out` asks for to fill the device, a slice a sum over 32 lanes, a lane one chain of fused
// multiply-adds; the order depends on in, out and form only, so a row's bits depend on nothing but the row and the matrix. fp32: within
// roundings of codec/cuda/rows_product.h, which has the CPU's bits.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "device/stream.h"
#include "ops/cuda/native_weight.h"

namespace espalier::ops::cuda {

struct NativeProductParams {
  NativeWeight weight;
  const float* x = nullptr;  // [n_rows, in], rows x_stride apart
  int64_t x_stride = 0;
  float* y = nullptr;        // [n_rows, out], rows y_stride apart; must not alias x
  int64_t y_stride = 0;
  int64_t n_rows = 0;
};

// Eight inputs at a time: `in`, x_stride and the scales' blocks must be multiples of 8, x 16-byte aligned.
bool can_multiply_fast(const NativeWeight& weight, const float* x, int64_t x_stride);
// Queues one launch. Errors: invalid_argument when can_multiply_fast is false or there are too many rows for a launch.
Status multiply_native_fast(device::Stream& stream, const NativeProductParams& p);

}  // namespace espalier::ops::cuda
