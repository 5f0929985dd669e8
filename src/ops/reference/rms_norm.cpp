#include "ops/rms_norm.h"

#include <cmath>

namespace espalier::ops::reference {

void rms_norm(const RmsNormParams& p) {
  for (int64_t t = 0; t < p.n_rows; ++t) {
    double sum = 0;
    for (int64_t i = 0; i < p.d; ++i)
      sum += static_cast<double>(p.x[t * p.d + i]) * static_cast<double>(p.x[t * p.d + i]);
    const double r = 1.0 / std::sqrt(sum / static_cast<double>(p.d) + p.eps);
    for (int64_t i = 0; i < p.d; ++i) {
      p.y[t * p.d + i] =
          static_cast<float>(static_cast<double>(p.weight[i]) * static_cast<double>(p.x[t * p.d + i]) * r);
    }
  }
}

}  // namespace espalier::ops::reference
