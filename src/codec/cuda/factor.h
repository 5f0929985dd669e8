// The fp64 part of quantizing on a GPU: rotation, factorisation, error feedback, the true error. Every number is the
// one that codec/hadamard, block_ldl, rotation and error measures give on a CPU: the same operations in the same order,
// none contracted. All pointers are device memory; all calls are queued on the stream.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "device/buffer.h"
#include "device/stream.h"

namespace espalier::codec {

// out [k, k] = Hk diag(su) (h + damping) diag(su) Hk; h symmetric, su [k] with signs.
Status rotate_hessian_on_device(device::Stream& stream, const double* h, const double* su, double damping, int64_t k,
                                double* out);
// out [k, n] = Hk diag(1/su) weight diag(1/sv) Hn, zero where a scale is.
Status rotate_weight_on_device(device::Stream& stream, const float* weight, const double* su, const double* sv,
                               int64_t k, int64_t n, double* out);

// a [n, n] -> U with a = U^T U in its upper triangle; what is below is spoiled. n a multiple of 128. *failed (device)
// becomes 1 when a pivot is not positive or not finite.
Status cholesky_on_device(device::Stream& stream, double* a, int64_t n, int* failed);
// feedback [n, n] of block_ldl_feedback: row r is column r of the block L, rows below r's 16-block; zero elsewhere.
Status block_ldl_feedback_on_device(device::Stream& stream, const double* upper, int64_t n, double* feedback);

// out [k, n] = what a packed matrix decodes to: Hk diag(su) inner diag(sv) Hn, with inner = rotated weight - error,
// rounded to fp32 once. scratch [k, n].
Status decode_on_device(device::Stream& stream, const double* weight, const double* error, const double* su,
                        const double* sv, int64_t k, int64_t n, double* scratch, float* out);
// sums[0..3] = tr(E^T H E), tr(W^T H W), |E|^2, |W|^2 for E = weight - decoded; h [k, k] or null for the identity. Sums
// per row in ascending order, then over the rows. scratch [2, k, n], rows [4, k].
Status measure_on_device(device::Stream& stream, const float* weight, const float* decoded, const double* h, int64_t k,
                         int64_t n, double* scratch, double* rows, double* sums);

}  // namespace espalier::codec
