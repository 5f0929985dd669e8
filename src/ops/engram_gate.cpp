#include "ops/engram_gate.h"

#include <cmath>

#include "base/simd_tier.h"
#include "ops/cpu/kernels.h"
#include "ops/parallel.h"
#include "ops/scalar_math.h"

namespace espalier::ops {

void engram_gate(ThreadPool& pool, const EngramGateParams& p) {
  if (active_simd_tier() == SimdTier::kReference) return reference::engram_gate(p);
  const Kernels& kernel = kernels();
  const double d = static_cast<double>(p.d_model);
  for_rows(pool, p.n_rows, 3.0 * static_cast<double>(p.n_streams * p.d_model), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* kv = p.kv + t * (p.n_streams + 1) * p.d_model;
      const float* value = kv + p.n_streams * p.d_model;
      for (int64_t c = 0; c < p.n_streams; ++c) {
        float* h = p.h + (t * p.n_streams + c) * p.d_model;
        const float* key = kv + c * p.d_model;
        double dot = kernel.gate_dot(h, p.q_weight + c * p.d_model, p.k_weight + c * p.d_model, key, p.d_model);
        dot *= 1.0 / std::sqrt(kernel.sum_squares(h, p.d_model) / d + p.norm_eps);
        dot *= 1.0 / std::sqrt(kernel.sum_squares(key, p.d_model) / d + p.norm_eps);
        dot *= 1.0 / std::sqrt(d);
        const double size = std::sqrt(std::fmax(std::fabs(dot), 1e-6));
        kernel.add_scaled(h, value, static_cast<float>(sigmoid_d(std::copysign(size, dot))), p.d_model);
      }
    }
  });
}

}  // namespace espalier::ops
