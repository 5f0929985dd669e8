// After the search: better scales for the fixed trellis, and the error measures that judge a result. Internal, except
// measure_error, which quantizer.h declares.
//
// One round solves least squares for the output scales (a number per column), then for the input scales (one k x k system),
// both under the damped Hessian. fp64 in fixed order; the scales are rounded to fp16 after each half.
// Source: docs/formats/exl3.md, "Refit".
#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.h"
#include "codec/exl3_tensor.h"

namespace espalier::codec {

// weight [k, n]; hessian [k, k] symmetric with mean diagonal 1; changes tensor.suh and tensor.svh only. Scales that are zero
// stay zero; a factor that is not finite or leaves [1/2, 2] is not applied.
void refit_scales(const float* weight, const std::vector<double>& hessian, double damping, int n_rounds,
                  Exl3Tensor& tensor, ThreadPool& pool);

}  // namespace espalier::codec
