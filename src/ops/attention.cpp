#include "ops/attention.h"

#include <algorithm>
#include <vector>

#include "base/simd_tier.h"
#include "ops/cpu/kernels.h"
#include "ops/parallel.h"

namespace espalier::ops {

void attention(ThreadPool& pool, const AttentionParams& p) {
  if (p.n_rows == 0) return;
  if (active_simd_tier() == SimdTier::kReference) return reference::attention(p);
  const Kernels& kernel = kernels();
  const int64_t mean_keys = p.key_begin[p.n_rows] / p.n_rows;
  const double cost = static_cast<double>(mean_keys * p.n_heads) * (5.0 + 0.1 * static_cast<double>(p.head_dim));
  for_rows(pool, p.n_rows, cost, [&](int64_t begin, int64_t end) {
    std::vector<float> scores;
    for (int64_t t = begin; t < end; ++t) {
      const int64_t n_keys = p.key_begin[t + 1] - p.key_begin[t];
      float* out = p.out + t * p.n_heads * p.head_dim;
      scores.resize(std::max(scores.size(), static_cast<size_t>(p.n_heads * (n_keys + 1))));
      const AttentionRow row = {p.q + t * p.n_heads * p.head_dim,
                                p.keys + p.key_begin[t],
                                n_keys,
                                p.n_heads,
                                p.head_dim,
                                p.sink,
                                p.scale,
                                scores.data(),
                                out};
      if (p.is_online) {
        kernel.attention_online(row);
      } else {
        kernel.attention(row);
      }
    }
  });
}

}  // namespace espalier::ops
