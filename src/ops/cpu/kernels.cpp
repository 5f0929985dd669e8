#include "ops/cpu/kernels.h"

#include "base/simd_tier.h"

namespace espalier::ops {

const Kernels& kernels() {
#if defined(__x86_64__)
  switch (active_simd_tier()) {
    case SimdTier::kAvx2: return *avx2_kernels();
    case SimdTier::kAvx512: return *avx512_kernels();
    default: break;
  }
#endif
  return *baseline_kernels();
}

}  // namespace espalier::ops
