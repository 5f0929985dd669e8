// Products with EXL3 tensors on the CPU: y = had(z) * svh, z = had(x * suh) * inner, all in fp32 with a fixed order.
//
// Arithmetic: x*suh is one rounding; the rotation is hadamard.h's; z[t][o] is one FMA chain over k ascending from 0; the
// output rotation and svh follow. So every row's bits are independent of the other rows, the batch size, the number of threads
// and the SIMD tier, and equal to rotate_input -> any GEMM with that chain over decode_inner() -> rotate_output.
// Source: docs/formats/exl3.md, "Forward order".
#pragma once

#include <cstdint>

#include "base/simd_tier.h"
#include "base/thread_pool.h"
#include "codec/exl3_tensor.h"

namespace espalier::codec {

// y [rows, n]:f32 = x [rows, k]:f32 times the packed tensor; y must not alias x.
// Decodes strips of 64 columns on the fly, once per call, so memory stays small and many rows share the decoding.
// Threads: over strips. Cost: k*n decodes and rows*k*n multiply-adds.
void exl3_matmul(ThreadPool& pool, const Exl3View& weight, const float* x, int64_t rows, float* y,
                 SimdTier tier = active_simd_tier());

// The two halves around the inner product, for callers that keep decode_inner() as fp32 panels.
// xh [rows, k] = had(x * suh); may alias x.
void rotate_input(const Exl3View& weight, const float* x, int64_t rows, float* xh);
// y [rows, n] = had(z) * svh; may alias z.
void rotate_output(const Exl3View& weight, const float* z, int64_t rows, float* y);

}  // namespace espalier::codec
