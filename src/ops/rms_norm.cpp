#include "ops/rms_norm.h"

#include <cmath>

#include "base/simd_tier.h"
#include "ops/cpu/kernels.h"
#include "ops/parallel.h"

namespace espalier::ops {

float inverse_rms(const float* x, int64_t d, double eps) {
  if (d == 0) return 0.0f;
  return static_cast<float>(1.0 / std::sqrt(kernels().sum_squares(x, d) / static_cast<double>(d) + eps));
}

void rms_norm(ThreadPool& pool, const RmsNormParams& p) {
  if (active_simd_tier() == SimdTier::kReference) return reference::rms_norm(p);
  const Kernels& kernel = kernels();
  for_rows(pool, p.n_rows, static_cast<double>(p.d), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float r = inverse_rms(p.x + t * p.d, p.d, p.eps);
      kernel.scale_by(p.x + t * p.d, p.weight, r, p.d, p.y + t * p.d);
    }
  });
}

}  // namespace espalier::ops
