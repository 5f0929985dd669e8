#include "ops/compress_group.h"

#include "base/simd_tier.h"
#include "ops/parallel.h"
#include "ops/scalar_math.h"

namespace espalier::ops {

void compress_group(ThreadPool& pool, const CompressGroupParams& p) {
  if (active_simd_tier() == SimdTier::kReference) return reference::compress_group(p);
  for_rows(pool, p.n_groups, 10.0 * static_cast<double>(p.ratio * p.d), [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) {
      const float* const* kv = p.kv + g * p.ratio;
      const float* const* gate = p.gate + g * p.ratio;
      for (int64_t d = 0; d < p.d; ++d) {
        float top = gate[0][d];
        for (int64_t i = 1; i < p.ratio; ++i) top = gate[i][d] > top ? gate[i][d] : top;
        float total = 0;
        for (int64_t i = 0; i < p.ratio; ++i) total += static_cast<float>(exp_d(static_cast<double>(gate[i][d] - top)));
        float sum = 0;
        for (int64_t i = 0; i < p.ratio; ++i) {
          const float weight = static_cast<float>(exp_d(static_cast<double>(gate[i][d] - top))) / total;
          sum += weight * kv[i][d];
        }
        p.out[g * p.d + d] = sum;
      }
    }
  });
}

}  // namespace espalier::ops
