#include "ops/router.h"

#include <cmath>
#include <vector>

#include "ops/select.h"

namespace espalier::ops::reference {

void router(const RouterParams& p) {
  std::vector<float> biased(static_cast<size_t>(p.n_experts));
  for (int64_t t = 0; t < p.n_rows; ++t) {
    float* scores = p.scores + t * p.n_experts;
    for (int64_t e = 0; e < p.n_experts; ++e) {
      const double x = static_cast<double>(p.logits[t * p.n_experts + e]) / static_cast<double>(p.temperature);
      scores[e] = static_cast<float>(std::sqrt(x > 20.0 ? x : std::log1p(std::exp(x))));
      biased[static_cast<size_t>(e)] = scores[e] + p.bias[e];
    }
    std::vector<int32_t> chosen;
    reference::select_top_k(biased.data(), p.n_experts, p.n_active, nullptr, 1, chosen);
    double sum = 0;
    for (int32_t e : chosen) sum += static_cast<double>(scores[e]);
    for (int64_t i = 0; i < p.n_active; ++i) {
      const int32_t e = chosen[static_cast<size_t>(i)];
      p.ids[t * p.n_active + i] = e;
      p.weights[t * p.n_active + i] =
          static_cast<float>(static_cast<double>(scores[e]) / (sum + 1e-20) * static_cast<double>(p.scale));
    }
  }
}

}  // namespace espalier::ops::reference
