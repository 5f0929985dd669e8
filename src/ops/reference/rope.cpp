#include "ops/rope.h"

#include <cmath>

namespace espalier::ops::reference {

void rope(const RopeParams& p) {
  for (int64_t t = 0; t < p.n_rows; ++t) {
    for (int64_t h = 0; h < p.n_heads; ++h) {
      float* x = p.x + (t * p.n_heads + h) * p.head_dim + p.head_dim - p.rope_dim;
      for (int64_t i = 0; i < p.rope_dim / 2; ++i) {
        const float angle = static_cast<float>(p.positions[t]) * p.frequencies[i];
        const double c = std::cos(static_cast<double>(angle));
        const double s = (p.is_inverse ? -1.0 : 1.0) * std::sin(static_cast<double>(angle));
        const double u = static_cast<double>(x[2 * i]);
        const double v = static_cast<double>(x[2 * i + 1]);
        x[2 * i] = static_cast<float>(u * c - v * s);
        x[2 * i + 1] = static_cast<float>(u * s + v * c);
      }
    }
  }
}

}  // namespace espalier::ops::reference
