#include "ops/router.h"

#include <cmath>
#include <vector>

#include "base/check.h"
#include "base/simd_tier.h"
#include "ops/parallel.h"
#include "ops/scalar_math.h"
#include "ops/select.h"

namespace espalier::ops {

void router(ThreadPool& pool, const RouterParams& p) {
  CHECK(p.n_active >= 1 && p.n_active <= p.n_experts) << p.n_active << " of " << p.n_experts << " experts";
  if (active_simd_tier() == SimdTier::kReference) return reference::router(p);
  for_rows(pool, p.n_rows, 30.0 * static_cast<double>(p.n_experts), [&](int64_t begin, int64_t end) {
    std::vector<float> biased(static_cast<size_t>(p.n_experts));
    std::vector<int32_t> chosen;
    for (int64_t t = begin; t < end; ++t) {
      float* scores = p.scores + t * p.n_experts;
      for (int64_t e = 0; e < p.n_experts; ++e) {
        const float logit = p.logits[t * p.n_experts + e] / p.temperature;
        scores[e] = static_cast<float>(std::sqrt(softplus_d(static_cast<double>(logit))));
        biased[static_cast<size_t>(e)] = scores[e] + p.bias[e];
      }
      chosen.clear();
      select_top_k(biased.data(), p.n_experts, p.n_active, nullptr, 1, chosen);
      float sum = 0;
      for (int32_t e : chosen) sum += scores[e];
      for (int64_t i = 0; i < p.n_active; ++i) {
        const int32_t e = chosen[static_cast<size_t>(i)];
        p.ids[t * p.n_active + i] = e;
        p.weights[t * p.n_active + i] = scores[e] / (sum + 1e-20f) * p.scale;
      }
    }
  });
}

}  // namespace espalier::ops
