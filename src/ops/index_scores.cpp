#include "ops/index_scores.h"

#include "base/simd_tier.h"
#include "ops/cpu/kernels.h"
#include "ops/parallel.h"

namespace espalier::ops {

void set_index_key(float* panels, int64_t dim, int64_t j, const float* key) {
  float* to = panels + j / kPanelWidth * dim * kPanelWidth + j % kPanelWidth;
  for (int64_t d = 0; d < dim; ++d) to[d * kPanelWidth] = key[d];
}

void get_index_key(const float* panels, int64_t dim, int64_t j, float* key) {
  const float* from = panels + j / kPanelWidth * dim * kPanelWidth + j % kPanelWidth;
  for (int64_t d = 0; d < dim; ++d) key[d] = from[d * kPanelWidth];
}

void index_scores(ThreadPool& pool, const IndexScoresParams& p) {
  if (p.n_rows == 0) return;
  if (active_simd_tier() == SimdTier::kReference) return reference::index_scores(p);
  const Kernels& kernel = kernels();
  const int64_t most = p.n_visible[p.n_rows - 1];
  const double cost = 0.05 * static_cast<double>(most * p.n_heads * p.dim) + 100.0;
  for_rows(pool, p.n_rows, cost, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(static_cast<size_t>(p.n_heads * 1024));
    for (int64_t t = begin; t < end; ++t) {
      kernel.index_scores({p.queries + t * p.n_heads * p.dim, p.weights + t * p.n_heads, p.key_panels, p.n_heads, p.dim,
                           p.n_visible[t], p.round_bf16, scratch.data(), p.out + p.out_begin[t]});
    }
  });
}

}  // namespace espalier::ops
