#include "ops/index_scores.h"

#include <algorithm>

#include "tensor/float_formats.h"

namespace espalier::ops::reference {

void index_scores(const IndexScoresParams& p) {
  std::vector<float> key(static_cast<size_t>(p.dim));
  for (int64_t t = 0; t < p.n_rows; ++t) {
    for (int64_t j = 0; j < p.n_visible[t]; ++j) {
      get_index_key(p.key_panels, p.dim, j, key.data());
      double score = 0;
      for (int64_t h = 0; h < p.n_heads; ++h) {
        const float* q = p.queries + (t * p.n_heads + h) * p.dim;
        double dot = 0;
        for (int64_t d = 0; d < p.dim; ++d)
          dot += static_cast<double>(q[d]) * static_cast<double>(key[static_cast<size_t>(d)]);
        const double w = static_cast<double>(p.weights[t * p.n_heads + h]);
        if (p.round_bf16) {
          const float rounded = round_bf16(static_cast<float>(dot));
          score += static_cast<double>(round_bf16(static_cast<float>(std::max(0.0, static_cast<double>(rounded)) * w)));
        } else {
          score += std::max(0.0, dot) * w;
        }
      }
      const float out = static_cast<float>(score);
      p.out[p.out_begin[t] + j] = p.round_bf16 ? round_bf16(out) : out;
    }
  }
}

}  // namespace espalier::ops::reference
