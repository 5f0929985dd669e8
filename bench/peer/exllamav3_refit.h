// exllamav3's measure of its own result, and the scale refit of its 1.5 line, restated. Source: EXL3 specification 5.7.
#pragma once

#include <cstdint>
#include <vector>

#include "bench/peer/exllamav3_hessian.h"

namespace espalier::peer {

// tr(E^T H E) / max(tr(W^T H W), 1e-8) in the rotated basis with the damped Hessian; mean square of the error without
// one.
double proxy_error(const std::vector<float>& weight_r, const std::vector<double>& error, int64_t k, int64_t n,
                   const PreparedHessian& hessian);

// inner [k, n] codebook values; hessian [k, k] damped, original basis. Twice: a least-squares factor per output column,
// then one per input row; factors that are not finite and positive are not applied. Changes su and sv.
void refit_scales(const float* weight, const std::vector<float>& inner, int64_t k, int64_t n,
                  const std::vector<double>& hessian, std::vector<float>& su, std::vector<float>& sv);

}  // namespace espalier::peer
