// The operations on residual streams (ops/mhc.h) when there are four of them, as in the released network: vectors of four channels, Sinkhorn
// in one warp. Apart from the statistics of the fast order the bits are those of the general form. Device code only; for streams.cu.
#pragma once

#include "ops/cuda/lanes.cuh"
#include "ops/mhc.h"
#include "ops/scalar_math.h"

namespace espalier::ops::cuda {
namespace {

__device__ __forceinline__ float sigmoid_f(float x) { return static_cast<float>(sigmoid_d(static_cast<double>(x))); }

constexpr int kWideThreads = 1024;  // of a row in the fast order

// 1 / rms of n values from the squares that each of kWideThreads threads has added up: the tree of every warp, then that of the warps. In every
// thread of the block.
__device__ __forceinline__ float wide_inverse_rms(float mine, int64_t n, double eps) {
  __shared__ float of_warp[kWideThreads / 32];
  __shared__ float shared_r;
  mine = warp_sum(mine);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x < 32) {
    const float sum = warp_sum(of_warp[threadIdx.x]);
    if (threadIdx.x == 0) shared_r = static_cast<float>(1.0 / sqrt(static_cast<double>(sum) / static_cast<double>(n) + eps));
  }
  __syncthreads();
  return shared_r;
}

// Squares of x[0, 4 n4), thread i has vectors i, i + kWideThreads, ...
__device__ __forceinline__ float wide_squares(const float* x, int64_t n4) {
  float mine = 0.0f;
#pragma unroll 5
  for (int64_t i = threadIdx.x; i < n4; i += kWideThreads) {
    const float4 v = reinterpret_cast<const float4*>(x)[i];
    mine = fmaf(v.x, v.x, mine), mine = fmaf(v.y, v.y, mine), mine = fmaf(v.z, v.z, mine), mine = fmaf(v.w, v.w, mine);
  }
  return mine;
}

// Sinkhorn of four streams by one warp: lane 4 i + j has element (i, j); sums are those of the general form, in ascending order.
__device__ __forceinline__ void coefficients_of_four(const MhcCoefficientsParams& p, int64_t t, float r) {
  constexpr int n = 4, width = n * (2 + n);
  constexpr unsigned kAll = 0xFFFFFFFFu;
  const int lane = static_cast<int>(threadIdx.x), row = lane / n, column = lane % n;
  float m = 0.0f;
  if (lane < width) m = p.dots[t * width + lane] * r * p.scale[lane < n ? 0 : lane < 2 * n ? 1 : 2] + p.base[lane];
  if (lane < 2 * n) {
    const float s = sigmoid_f(m);
    if (lane < n) {
      p.pre[t * n + lane] = s + p.hc_eps;
    } else {
      p.post[t * n + lane - n] = 2.0f * s;
    }
  }
  const float logit = __shfl_sync(kAll, m, (2 * n + lane) % 32);
  float top = __shfl_sync(kAll, logit, row * n);
#pragma unroll
  for (int j = 1; j < n; ++j) {
    const float other = __shfl_sync(kAll, logit, row * n + j);
    top = other > top ? other : top;
  }
  float mine = static_cast<float>(exp_d(static_cast<double>(logit - top)));
  const auto sum_over = [&](int first, int step) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < n; ++j) sum += __shfl_sync(kAll, mine, first + j * step);
    return sum;
  };
  mine = mine / sum_over(row * n, 1) + p.hc_eps;
  for (int round = 0; round < p.sinkhorn_iters; ++round) {
    if (round > 0) mine = mine / (sum_over(row * n, 1) + p.hc_eps);
    mine = mine / (sum_over(lane / (n * n) * (n * n) + column, n) + p.hc_eps);
  }
  if (lane < n * n) p.comb[t * n * n + lane] = mine;
}

// A block per row: the statistic, then four streams in one warp.
template <Order order>
__global__ __launch_bounds__(order == Order::kFast ? kWideThreads : kRowThreads) void mhc_coefficients_of_four_kernel(MhcCoefficientsParams p) {
  const int64_t t = blockIdx.x, n = 4 * p.d_model;
  float r;
  if constexpr (order == Order::kFast) {
    r = wide_inverse_rms(wide_squares(p.h + t * n, p.d_model), n, p.norm_eps);
    if (threadIdx.x >= 32) return;
  } else {
    r = block_inverse_rms<order>(p.h + t * n, n, p.norm_eps);
    if (threadIdx.x >= 32) return;
    r = __shfl_sync(0xFFFFFFFFu, r, 0);
  }
  coefficients_of_four(p, t, r);
}

// The fast order for four streams: the collapsed row stays in registers.
constexpr int kWideVectors = 2;  // of four channels, of a thread
constexpr int64_t kWideWidth = 4 * int64_t{kWideVectors} * kWideThreads;
__global__ __launch_bounds__(kWideThreads) void mhc_collapse_four_kernel(MhcCollapseParams p, const float* weight, double eps) {
  const int64_t t = blockIdx.x;
  const int n4 = static_cast<int>(p.d_model / 4), thread = static_cast<int>(threadIdx.x);
  const float4 w = reinterpret_cast<const float4*>(p.weights)[t];
  const float4* h = reinterpret_cast<const float4*>(p.h + t * 4 * p.d_model);
  float4 x[kWideVectors];
  float mine = 0.0f;
#pragma unroll
  for (int v = 0; v < kWideVectors; ++v) {
    const int at = thread + v * kWideThreads;
    if (at >= n4) continue;
    const float4 a = h[at], b = h[n4 + at], c = h[2 * n4 + at], d = h[3 * n4 + at];
    x[v].x = w.x * a.x + w.y * b.x + w.z * c.x + w.w * d.x;
    x[v].y = w.x * a.y + w.y * b.y + w.z * c.y + w.w * d.y;
    x[v].z = w.x * a.z + w.y * b.z + w.z * c.z + w.w * d.z;
    x[v].w = w.x * a.w + w.y * b.w + w.z * c.w + w.w * d.w;
    mine = fmaf(x[v].x, x[v].x, mine), mine = fmaf(x[v].y, x[v].y, mine), mine = fmaf(x[v].z, x[v].z, mine), mine = fmaf(x[v].w, x[v].w, mine);
  }
  const float r = wide_inverse_rms(mine, p.d_model, eps);
#pragma unroll
  for (int v = 0; v < kWideVectors; ++v) {
    const int at = thread + v * kWideThreads;
    if (at >= n4) continue;
    const float4 k = reinterpret_cast<const float4*>(weight)[at];
    reinterpret_cast<float4*>(p.out + t * p.d_model)[at] = {k.x * (x[v].x * r), k.y * (x[v].y * r), k.z * (x[v].z * r), k.w * (x[v].w * r)};
  }
}

// Four streams, four channels a thread; the bits of the general form.
constexpr int kExpandThreads = 128;
__global__ __launch_bounds__(kExpandThreads) void mhc_expand_four_kernel(MhcExpandParams p) {
  const int64_t t = blockIdx.y;
  const int n4 = static_cast<int>(p.d_model / 4), at = static_cast<int>(blockIdx.x * kExpandThreads + threadIdx.x);
  if (at >= n4) return;
  const float4* h = reinterpret_cast<const float4*>(p.h + t * 4 * p.d_model) + at;
  float4* out = reinterpret_cast<float4*>(p.out + t * 4 * p.d_model) + at;
  const float4 y = reinterpret_cast<const float4*>(p.y + t * p.d_model)[at];
  const float4 of[4] = {h[0], h[n4], h[2 * n4], h[3 * n4]};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float post = p.post[t * 4 + j];
    float4 sum = {post * y.x, post * y.y, post * y.z, post * y.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float w = p.comb[(t * 4 + i) * 4 + j];
      sum.x = sum.x + w * of[i].x, sum.y = sum.y + w * of[i].y, sum.z = sum.z + w * of[i].z, sum.w = sum.w + w * of[i].w;
    }
    out[j * n4] = sum;
  }
}

}  // namespace
}  // namespace espalier::ops::cuda
