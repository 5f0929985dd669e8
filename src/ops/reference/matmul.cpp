#include "ops/matmul.h"

#include "ops/cpu/kernels.h"  // kPanelWidth

namespace espalier::ops::reference {

void matmul(const MatmulParams& p) {
  const PackedMatrix& w = *p.weight;
  const float* panels = w.panels.f32();
  for (int64_t t = 0; t < p.n_rows; ++t) {
    for (int64_t o = 0; o < w.n; ++o) {
      double sum = 0;
      for (int64_t i = 0; i < w.k; ++i) {
        const float v = panels[(o / kPanelWidth * w.k + i) * kPanelWidth + o % kPanelWidth];
        sum += static_cast<double>(p.x[t * w.k + i]) * static_cast<double>(v);
      }
      p.y[t * w.n + o] = static_cast<float>(sum);
    }
  }
}

}  // namespace espalier::ops::reference
