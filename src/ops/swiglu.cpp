#include "ops/swiglu.h"

#include "base/simd_tier.h"
#include "ops/cpu/kernels.h"
#include "ops/parallel.h"

namespace espalier::ops {

void swiglu(ThreadPool& pool, const SwigluParams& p) {
  if (active_simd_tier() == SimdTier::kReference) return reference::swiglu(p);
  const Kernels& kernel = kernels();
  for_rows(pool, p.n_rows, 4.0 * static_cast<double>(p.d), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      kernel.swiglu(p.a + t * p.d, p.u + t * p.d, p.limit, p.gate != nullptr ? p.gate[t] : 1.0f, p.d, p.z + t * p.d);
    }
  });
}

}  // namespace espalier::ops
