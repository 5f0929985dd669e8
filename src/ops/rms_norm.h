// RMS normalisation: y = w * (x * r), r = 1 / sqrt(mean(x^2) + eps). eps is added to the mean square and may be 1e-20.
//
// Fixed order: squares are summed in 16 double lanes (element i in lane i mod 16) and a fixed tree; the statistic is
// double, r is rounded to float, the two products are one float rounding each. Source: model.md 3.4.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"

namespace espalier::ops {

struct RmsNormParams {
  const float* x = nullptr;       // [n_rows, d]
  const float* weight = nullptr;  // [d]
  float* y = nullptr;             // [n_rows, d]; may alias x
  int64_t n_rows = 0;
  int64_t d = 0;
  double eps = 0;
};

void rms_norm(ThreadPool& pool, const RmsNormParams& p);
// r of one vector.
float inverse_rms(const float* x, int64_t d, double eps);

namespace reference {
void rms_norm(const RmsNormParams& p);
}

}  // namespace espalier::ops
