// A matrix and its Hessian in the basis in which tiles are searched. Internal to the quantizer.
//
// weight = Hk diag(1/suh) W diag(1/svh) Hn and hessian = Hk diag(suh) (H + damping) diag(suh) Hk, so that tr(E^T
// hessian E) is the objective up to the output scales. exllamav3 leaves the magnitudes of suh out of its Hessian.
// Source: docs/formats/exl3.md, "Quantizing".
#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.h"
#include "base/simd_tier.h"
#include "codec/weight_scales.h"

namespace espalier::codec {

// Hk diag(s) (h + damping) diag(s) Hk for h [size, size] symmetric; s has the given magnitudes and the signs of
// `signed_scales` (fp16), so either side of the matrix can be asked for.
std::vector<double> rotate_metric(const std::vector<double>& h, double damping, const std::vector<double>& magnitudes,
                                  const std::vector<uint16_t>& signed_scales, ThreadPool& pool);
// Rows and columns without a scale become zero.
std::vector<double> rotate_weight(const float* weight, int64_t k, int64_t n, const WeightScales& scales,
                                  ThreadPool& pool);

}  // namespace espalier::codec
