// y = had(had(x * suh) inner) * svh for a few rows on a GPU, mul1 matrices of any width.
//
// Activations are two int8 digits a value (main and residual, scale per 128 of a row), weights are the affine form of the codebook;
// sums over 128 rows are exact integers, the sum over chunks is fp32 in an order that depends on k only. Relative output
// error about 2e-4, most of it the fp16 rounding of the codebook that the affine form leaves out.
// A row's bits depend on nothing but the row and the matrix: not on the other rows, their number, or the launch.
// Source: docs/decisions/cuda-exl3-kernels.md; codec/matmul.h is the same product on the CPU in fp32.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "codec/cuda/matrix.h"
#include "device/buffer.h"
#include "device/stream.h"

namespace espalier::codec::cuda {

inline constexpr int kMaxProductRows = 16;

// What a chunk of a row needs besides its digits: y += scale * (254 * main + residual), sums started at the two offsets.
struct ChunkScale {
  float scale;
  int start_main, start_residual;
  int unused;
};

// Device memory that products share; one product at a time uses it, in stream order. Counters in it are zero between launches.
class ProductScratch {
 public:
  // Enough for matrices of up to k x n and kMaxProductRows rows.
  static Result<ProductScratch> create(device::Stream& stream, int64_t max_k, int64_t max_n);

  int64_t max_k = 0, max_n = 0;
  bool has_dependent_launch = false;
  device::DeviceArray<float> partials;      // [n/128, rows, slices of k, 128]
  device::DeviceArray<uint32_t> arrivals;   // [n/128]
  device::DeviceArray<uint8_t> digits;      // [rows, k/128, 256]
  device::DeviceArray<ChunkScale> scales;     // [rows, k/128]
};

enum class ProductPlan {
  kAuto,      // by the number of rows
  kOneLaunch, // every block rotates what it needs itself
  kTwoLaunches,  // rows are rotated once by a launch of their own, overlapped with the start of the product
};

// x [rows, k]:f32, y [rows, n]:f32, 1 <= rows <= kMaxProductRows, 16-byte aligned; y must not alias x.
// Queues one or two launches. Errors: unimplemented for other codebooks than mul1, invalid_argument for rows or scratch out of range.
Status multiply(device::Stream& stream, const DeviceMatrix& matrix, const float* x, int64_t rows, float* y, ProductScratch& scratch,
                ProductPlan plan = ProductPlan::kAuto);

}  // namespace espalier::codec::cuda
