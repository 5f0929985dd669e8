#include "ops/swiglu.h"

#include <algorithm>
#include <cmath>

namespace espalier::ops::reference {

void swiglu(const SwigluParams& p) {
  const double limit = static_cast<double>(p.limit);
  for (int64_t t = 0; t < p.n_rows; ++t) {
    const double gate = p.gate != nullptr ? static_cast<double>(p.gate[t]) : 1.0;
    for (int64_t i = 0; i < p.d; ++i) {
      const double a = std::min(static_cast<double>(p.a[t * p.d + i]), limit);
      const double u = std::clamp(static_cast<double>(p.u[t * p.d + i]), -limit, limit);
      p.z[t * p.d + i] = static_cast<float>(a / (1.0 + std::exp(-a)) * u * gate);
    }
  }
}

}  // namespace espalier::ops::reference
