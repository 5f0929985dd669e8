// Single-pass multi-stream residuals (mHC): coefficients, collapse of the streams into a sub-layer's input, expansion
// of its output back into the streams. Source: model.md section 4.
//
// Arithmetic is fp32 in the vendor's order (one rounding per operation); exponentials come from scalar_math.h; the
// statistic over all streams is ops/rms_norm.h's. The last Sinkhorn step normalises columns, and it is not to be
// "fixed" into rows.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"

namespace espalier::ops {

inline constexpr int64_t kMaxStreams = 8;

struct MhcCoefficientsParams {
  const float* h = nullptr;      // [n_rows, n_streams * d_model]
  const float* dots = nullptr;   // [n_rows, n_streams*(2+n_streams)] = h * fn^T, unscaled
  const float* scale = nullptr;  // [3]
  const float* base = nullptr;   // [n_streams*(2+n_streams)]
  float* pre = nullptr;          // [n_rows, n_streams]
  float* post = nullptr;         // [n_rows, n_streams]
  float* comb = nullptr;         // [n_rows, n_streams(source), n_streams(destination)]
  int64_t n_rows = 0;
  int64_t n_streams = 0;
  int64_t d_model = 0;
  int sinkhorn_iters = 0;
  double norm_eps = 0;  // 1e-20 in the released model
  float hc_eps = 0;
};
void mhc_coefficients(ThreadPool& pool, const MhcCoefficientsParams& p);

struct MhcCollapseParams {
  const float* h = nullptr;        // [n_rows, n_streams, d_model]
  const float* weights = nullptr;  // [n_rows, n_streams]
  float* out = nullptr;            // [n_rows, d_model] = sum over streams, ascending
  int64_t n_rows = 0;
  int64_t n_streams = 0;
  int64_t d_model = 0;
};
void mhc_collapse(ThreadPool& pool, const MhcCollapseParams& p);

struct MhcExpandParams {
  const float* y = nullptr;     // [n_rows, d_model]
  const float* h = nullptr;     // [n_rows, n_streams, d_model]
  const float* post = nullptr;  // [n_rows, n_streams]
  const float* comb = nullptr;  // [n_rows, n_streams(source), n_streams(destination)]
  float* out = nullptr;         // [n_rows, n_streams, d_model]; must not alias h
  int64_t n_rows = 0;
  int64_t n_streams = 0;
  int64_t d_model = 0;
};
// out[j] = post[j]*y + sum_i comb[i][j]*h[i], i ascending.
void mhc_expand(ThreadPool& pool, const MhcExpandParams& p);

namespace reference {
void mhc_coefficients(const MhcCoefficientsParams& p);
void mhc_collapse(const MhcCollapseParams& p);
void mhc_expand(const MhcExpandParams& p);
}  // namespace reference

}  // namespace espalier::ops
