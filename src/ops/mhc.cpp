#include "ops/mhc.h"

#include "base/check.h"
#include "base/simd_tier.h"
#include "ops/cpu/kernels.h"
#include "ops/parallel.h"
#include "ops/rms_norm.h"
#include "ops/scalar_math.h"

namespace espalier::ops {
namespace {

float sigmoid_f(float x) {
  return static_cast<float>(sigmoid_d(static_cast<double>(x)));
}

// C: softmax over destinations, then alternating column and row normalisation, columns last.
void sinkhorn(const float* logits, int64_t n, int iters, float eps, float* c) {
  for (int64_t i = 0; i < n; ++i) {
    float m = logits[i * n];
    for (int64_t j = 1; j < n; ++j) m = logits[i * n + j] > m ? logits[i * n + j] : m;
    float sum = 0;
    for (int64_t j = 0; j < n; ++j) {
      c[i * n + j] = static_cast<float>(exp_d(static_cast<double>(logits[i * n + j] - m)));
      sum += c[i * n + j];
    }
    for (int64_t j = 0; j < n; ++j) c[i * n + j] = c[i * n + j] / sum + eps;
  }
  for (int round = 0; round < iters; ++round) {
    if (round > 0) {
      for (int64_t i = 0; i < n; ++i) {
        float sum = 0;
        for (int64_t j = 0; j < n; ++j) sum += c[i * n + j];
        for (int64_t j = 0; j < n; ++j) c[i * n + j] = c[i * n + j] / (sum + eps);
      }
    }
    for (int64_t j = 0; j < n; ++j) {
      float sum = 0;
      for (int64_t i = 0; i < n; ++i) sum += c[i * n + j];
      for (int64_t i = 0; i < n; ++i) c[i * n + j] = c[i * n + j] / (sum + eps);
    }
  }
}

}  // namespace

void mhc_coefficients(ThreadPool& pool, const MhcCoefficientsParams& p) {
  CHECK(p.n_streams >= 1 && p.n_streams <= kMaxStreams) << "streams: " << p.n_streams;
  if (active_simd_tier() == SimdTier::kReference) return reference::mhc_coefficients(p);
  const int64_t n = p.n_streams;
  const int64_t width = n * (2 + n);
  for_rows(pool, p.n_rows, static_cast<double>(n * p.d_model) + 3000.0, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float r = inverse_rms(p.h + t * n * p.d_model, n * p.d_model, p.norm_eps);
      float m[kMaxStreams * (2 + kMaxStreams)];
      for (int64_t i = 0; i < width; ++i) {
        const float scale = p.scale[i < n ? 0 : i < 2 * n ? 1 : 2];
        m[i] = p.dots[t * width + i] * r * scale + p.base[i];
      }
      for (int64_t c = 0; c < n; ++c) p.pre[t * n + c] = sigmoid_f(m[c]) + p.hc_eps;
      for (int64_t c = 0; c < n; ++c) p.post[t * n + c] = 2.0f * sigmoid_f(m[n + c]);
      sinkhorn(m + 2 * n, n, p.sinkhorn_iters, p.hc_eps, p.comb + t * n * n);
    }
  });
}

void mhc_collapse(ThreadPool& pool, const MhcCollapseParams& p) {
  if (active_simd_tier() == SimdTier::kReference) return reference::mhc_collapse(p);
  const Kernels& kernel = kernels();
  const int64_t row = p.n_streams * p.d_model;
  for_rows(pool, p.n_rows, 0.3 * static_cast<double>(row), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      kernel.collapse(p.h + t * row, p.weights + t * p.n_streams, p.n_streams, p.d_model, p.out + t * p.d_model);
    }
  });
}

void mhc_expand(ThreadPool& pool, const MhcExpandParams& p) {
  if (active_simd_tier() == SimdTier::kReference) return reference::mhc_expand(p);
  const Kernels& kernel = kernels();
  const int64_t row = p.n_streams * p.d_model;
  for_rows(pool, p.n_rows, static_cast<double>(row), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      kernel.expand(p.y + t * p.d_model, p.h + t * row, p.post + t * p.n_streams,
                    p.comb + t * p.n_streams * p.n_streams, p.n_streams, p.d_model, p.out + t * row);
    }
  });
}

}  // namespace espalier::ops
