// Clamped SwiGLU: z = silu(min(a, limit)) * clamp(u, -limit, limit) [* gate[row]]; elementwise, one rounding per
// operation, silu in double from scalar_math.h rounded to float. Source: model.md section 6.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"

namespace espalier::ops {

struct SwigluParams {
  const float* a = nullptr;     // [n_rows, d] gate projection
  const float* u = nullptr;     // [n_rows, d] up projection
  const float* gate = nullptr;  // [n_rows] or null for 1
  float* z = nullptr;           // [n_rows, d]; may alias a or u
  int64_t n_rows = 0;
  int64_t d = 0;
  float limit = 0;
};

void swiglu(ThreadPool& pool, const SwigluParams& p);

namespace reference {
void swiglu(const SwigluParams& p);
}

}  // namespace espalier::ops
