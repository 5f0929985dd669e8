#include "ops/attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "tensor/float_formats.h"

namespace espalier::ops::reference {
namespace {

double dot(const float* a, const float* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

}  // namespace

void attention(const AttentionParams& p) {
  const int64_t block = p.is_online ? 64 : INT64_MAX;
  for (int64_t t = 0; t < p.n_rows; ++t) {
    const float* const* keys = p.keys + p.key_begin[t];
    const int64_t n = p.key_begin[t + 1] - p.key_begin[t];
    for (int64_t h = 0; h < p.n_heads; ++h) {
      const float* q = p.q + (t * p.n_heads + h) * p.head_dim;
      std::vector<double> sum(static_cast<size_t>(p.head_dim), 0.0);
      double top = -1e30;
      double denominator = 0;
      for (int64_t j0 = 0; j0 < n; j0 += std::min(block, n)) {
        const int64_t j1 = j0 + std::min(block, n - j0);
        std::vector<double> s(static_cast<size_t>(j1 - j0), -INFINITY);
        const double before = top;
        for (int64_t j = j0; j < j1; ++j) {
          if (keys[j] != nullptr)
            s[static_cast<size_t>(j - j0)] = dot(q, keys[j], p.head_dim) * static_cast<double>(p.scale);
          top = std::max(top, s[static_cast<size_t>(j - j0)]);
        }
        const double shrink = std::exp(before - top);
        denominator *= shrink;
        for (double& v : sum) v *= shrink;
        for (int64_t j = j0; j < j1; ++j) {
          if (keys[j] == nullptr) continue;
          const double e = std::exp(s[static_cast<size_t>(j - j0)] - top);
          denominator += e;
          const double weight = p.is_online ? static_cast<double>(round_bf16(static_cast<float>(e))) : e;
          for (int64_t d = 0; d < p.head_dim; ++d)
            sum[static_cast<size_t>(d)] += weight * static_cast<double>(keys[j][d]);
        }
      }
      denominator += std::exp(static_cast<double>(p.sink[h]) - top);
      float* out = p.out + (t * p.n_heads + h) * p.head_dim;
      for (int64_t d = 0; d < p.head_dim; ++d) out[d] = static_cast<float>(sum[static_cast<size_t>(d)] / denominator);
    }
  }
}

}  // namespace espalier::ops::reference
