#include "ops/mhc.h"

#include <cmath>
#include <vector>

namespace espalier::ops::reference {

void mhc_coefficients(const MhcCoefficientsParams& p) {
  const int64_t n = p.n_streams;
  const int64_t width = n * (2 + n);
  const double eps = static_cast<double>(p.hc_eps);
  std::vector<double> m(static_cast<size_t>(width));
  for (int64_t t = 0; t < p.n_rows; ++t) {
    double sum = 0;
    for (int64_t i = 0; i < n * p.d_model; ++i) {
      const double v = static_cast<double>(p.h[t * n * p.d_model + i]);
      sum += v * v;
    }
    const double r = 1.0 / std::sqrt(sum / static_cast<double>(n * p.d_model) + p.norm_eps);
    for (int64_t i = 0; i < width; ++i) {
      const double scale = static_cast<double>(p.scale[i < n ? 0 : i < 2 * n ? 1 : 2]);
      m[static_cast<size_t>(i)] =
          static_cast<double>(p.dots[t * width + i]) * r * scale + static_cast<double>(p.base[i]);
    }
    const auto sigmoid = [](double x) { return 1.0 / (1.0 + std::exp(-x)); };
    for (int64_t c = 0; c < n; ++c) p.pre[t * n + c] = static_cast<float>(sigmoid(m[static_cast<size_t>(c)]) + eps);
    for (int64_t c = 0; c < n; ++c)
      p.post[t * n + c] = static_cast<float>(2.0 * sigmoid(m[static_cast<size_t>(n + c)]));
    std::vector<double> c(static_cast<size_t>(n * n));
    const auto at = [&](int64_t i, int64_t j) -> double& { return c[static_cast<size_t>(i * n + j)]; };
    for (int64_t i = 0; i < n; ++i) {
      double top = m[static_cast<size_t>(2 * n + i * n)];
      for (int64_t j = 1; j < n; ++j) top = std::max(top, m[static_cast<size_t>(2 * n + i * n + j)]);
      double total = 0;
      for (int64_t j = 0; j < n; ++j) total += at(i, j) = std::exp(m[static_cast<size_t>(2 * n + i * n + j)] - top);
      for (int64_t j = 0; j < n; ++j) at(i, j) = at(i, j) / total + eps;
    }
    for (int round = 0; round < p.sinkhorn_iters; ++round) {
      for (int64_t i = 0; round > 0 && i < n; ++i) {
        double total = 0;
        for (int64_t j = 0; j < n; ++j) total += at(i, j);
        for (int64_t j = 0; j < n; ++j) at(i, j) /= total + eps;
      }
      for (int64_t j = 0; j < n; ++j) {
        double total = 0;
        for (int64_t i = 0; i < n; ++i) total += at(i, j);
        for (int64_t i = 0; i < n; ++i) at(i, j) /= total + eps;
      }
    }
    for (int64_t i = 0; i < n * n; ++i) p.comb[t * n * n + i] = static_cast<float>(c[static_cast<size_t>(i)]);
  }
}

void mhc_collapse(const MhcCollapseParams& p) {
  for (int64_t t = 0; t < p.n_rows; ++t) {
    for (int64_t d = 0; d < p.d_model; ++d) {
      double sum = 0;
      for (int64_t c = 0; c < p.n_streams; ++c) {
        sum += static_cast<double>(p.weights[t * p.n_streams + c]) *
               static_cast<double>(p.h[(t * p.n_streams + c) * p.d_model + d]);
      }
      p.out[t * p.d_model + d] = static_cast<float>(sum);
    }
  }
}

void mhc_expand(const MhcExpandParams& p) {
  const int64_t n = p.n_streams;
  for (int64_t t = 0; t < p.n_rows; ++t) {
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t d = 0; d < p.d_model; ++d) {
        double sum = static_cast<double>(p.post[t * n + j]) * static_cast<double>(p.y[t * p.d_model + d]);
        for (int64_t i = 0; i < n; ++i) {
          sum +=
              static_cast<double>(p.comb[(t * n + i) * n + j]) * static_cast<double>(p.h[(t * n + i) * p.d_model + d]);
        }
        p.out[(t * n + j) * p.d_model + d] = static_cast<float>(sum);
      }
    }
  }
}

}  // namespace espalier::ops::reference
