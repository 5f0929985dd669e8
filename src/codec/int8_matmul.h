// Integer products with EXL3 tensors of the mul1 codebook: the same y = had(z) * svh, z = had(x * suh) * inner as
// codec/matmul.h, but the rotated activations are quantized and the inner product is a sum of integers.
//
// mul1 is affine in the byte sum of its product, v = kappa * (sum - 510) - 0.0018 up to the rounding to fp16, so
// sum over k of v * x needs only integer products of byte sums with integer activations. Per row and 128-chunk of k:
//   d = max|xh| / 127, main = rint(xh / d), residual = rint(254 * (xh / d - main)),
//   kPlain:    a = main                    z += kappa * d * T,        T = sum (s - 510) * a
//   kResidual: a = 254 * main + residual   z += kappa * d / 254 * T
// T is exact; z is one fp32 FMA chain over ascending chunks. So every row's bits are independent of the other rows, the
// batch, the threads, the SIMD tier and of how jobs are put together. Error against the exact product, relative and
// rms: about 0.006 (kPlain: 8-bit activations) and 2e-4 (kResidual: 15 to 16 bits; what is left is the codebook's
// rounding to fp16).
//
// A row with a NaN or an infinity among its rotated inputs (also by overflow of a finite one) gives NaN in all its
// outputs. A chunk of zeros contributes zero. Scales under- and overflow as fp32 products do. Source:
// docs/formats/exl3.md, "Integer products"; docs/decisions/codec-int8-products.md.
#pragma once

#include <cstdint>
#include <span>

#include "base/simd_tier.h"
#include "base/thread_pool.h"
#include "codec/exl3_tensor.h"

namespace espalier::codec {

enum class Int8Mode : uint8_t { kPlain, kResidual };

// True for mul1 at any width; the other codebooks are not sums of bytes and need exl3_matmul.
bool has_int8_matmul(const Exl3View& weight);

// One product of a list: y [rows, n]:f32 = x [rows, k]:f32 times the packed tensor. y must not alias any x of the list.
struct Int8Job {
  Exl3View weight;  // has_int8_matmul
  const float* x = nullptr;
  int64_t rows = 0;
  float* y = nullptr;
};

// All jobs of the list (any shapes, widths and numbers of rows) in one go: the same bits as one call each, but many
// small matrices, such as the experts of a layer, share the threads. Threads: over (job, 128 columns). Memory: 2 bytes
// per row and input. CHECKs that every job has_int8_matmul.
void int8_matmul(ThreadPool& pool, std::span<const Int8Job> jobs, Int8Mode mode, SimdTier tier = active_simd_tier());

// A list of one.
void int8_matmul(ThreadPool& pool, const Exl3View& weight, const float* x, int64_t rows, float* y, Int8Mode mode,
                 SimdTier tier = active_simd_tier());

}  // namespace espalier::codec
