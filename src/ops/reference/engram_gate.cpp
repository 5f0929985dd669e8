#include "ops/engram_gate.h"

#include <algorithm>
#include <cmath>

namespace espalier::ops::reference {

void engram_gate(const EngramGateParams& p) {
  for (int64_t t = 0; t < p.n_rows; ++t) {
    const float* kv = p.kv + t * (p.n_streams + 1) * p.d_model;
    const float* value = kv + p.n_streams * p.d_model;
    for (int64_t c = 0; c < p.n_streams; ++c) {
      float* h = p.h + (t * p.n_streams + c) * p.d_model;
      double dot = 0, hh = 0, kk = 0;
      for (int64_t d = 0; d < p.d_model; ++d) {
        const double hd = static_cast<double>(h[d]);
        const double kd = static_cast<double>(kv[c * p.d_model + d]);
        dot += hd * static_cast<double>(p.q_weight[c * p.d_model + d]) *
               static_cast<double>(p.k_weight[c * p.d_model + d]) * kd;
        hh += hd * hd;
        kk += kd * kd;
      }
      const double n = static_cast<double>(p.d_model);
      dot /= std::sqrt(hh / n + p.norm_eps) * std::sqrt(kk / n + p.norm_eps) * std::sqrt(n);
      const double x = std::copysign(std::sqrt(std::max(std::fabs(dot), 1e-6)), dot);
      const double gate = 1.0 / (1.0 + std::exp(-x));
      for (int64_t d = 0; d < p.d_model; ++d)
        h[d] = static_cast<float>(static_cast<double>(h[d]) + gate * static_cast<double>(value[d]));
    }
  }
}

}  // namespace espalier::ops::reference
