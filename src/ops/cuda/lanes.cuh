// What the row kernels share: sums in 16 double lanes with the fixed tree of ops/rms_norm.h, and launch sizes. Device code only.
//
// The order of every sum is that of ops/cpu/kernels_inl.h, and device code is compiled without contraction, so results have the
// CPU's bits. Nothing here depends on the number of blocks, rows or threads.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/cuda/order.h"

namespace espalier::ops::cuda {

inline constexpr int kRowThreads = 256;
inline constexpr int64_t kMaxGridBlocks = 65535;  // of an elementwise launch; its threads loop over the rest

inline unsigned grid_for(int64_t n, int64_t per_block) {
  const int64_t blocks = (n + per_block - 1) / per_block;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks < kMaxGridBlocks ? blocks : kMaxGridBlocks);
}

// The tree over 16 lanes of a half warp; the result is in lane 0. All 16 lanes of `mask` call it.
__device__ __forceinline__ double tree_of_16(double lane_sum, unsigned mask) {
#pragma unroll
  for (int w = 8; w >= 1; w /= 2) lane_sum = lane_sum + __shfl_down_sync(mask, lane_sum, w, 16);
  return lane_sum;
}

// Sum over x[i]^2, i < n, by a whole block of kRowThreads threads. Element i belongs to lane i mod 16; lanes add in ascending order.
// All threads square into shared memory, so that the 16 chains of additions wait for nothing else. The result is in thread 0.
__device__ inline double block_sum_squares(const float* x, int64_t n) {
  constexpr int kPiece = 2048;
  __shared__ double squares[kPiece];
  double sum = 0;
  for (int64_t begin = 0; begin < n; begin += kPiece) {
    const int size = static_cast<int>(n - begin < kPiece ? n - begin : kPiece);
    for (int i = static_cast<int>(threadIdx.x); i < size; i += static_cast<int>(blockDim.x)) {
      const double v = static_cast<double>(x[begin + i]);
      squares[i] = v * v;
    }
    __syncthreads();
    if (threadIdx.x < 16) {
#pragma unroll 16
      for (int i = static_cast<int>(threadIdx.x); i < size; i += 16) sum = sum + squares[i];
    }
    __syncthreads();
  }
  return threadIdx.x < 16 ? tree_of_16(sum, 0x0000FFFFu) : 0.0;
}

// The tree over the 32 lanes of a warp; the result is in every lane.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int w = 16; w >= 1; w /= 2) v = v + __shfl_xor_sync(0xFFFFFFFFu, v, w);
  return v;
}

// Order::kFast of a sum over values that kRowThreads threads hold one each: the tree of every warp, then the warps in order. The result is
// in every thread.
__device__ inline float block_sum_fast(float mine) {
  __shared__ float of_warp[kRowThreads / 32];
  mine = warp_sum(mine);
  __syncthreads();  // a sum before this one has been read
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  float sum = of_warp[0];
#pragma unroll
  for (int w = 1; w < kRowThreads / 32; ++w) sum = sum + of_warp[w];
  return sum;
}

// r of ops/rms_norm.h, in thread 0 of the block. Fast: thread i sums elements i, i + kRowThreads, ... in fp32.
template <Order order = Order::kCpu>
__device__ inline float block_inverse_rms(const float* x, int64_t d, double eps) {
  if (order == Order::kFast) {
    float mine = 0.0f;
#pragma unroll 8
    for (int64_t i = threadIdx.x; i < d; i += kRowThreads) mine = fmaf(x[i], x[i], mine);
    return static_cast<float>(1.0 / sqrt(static_cast<double>(block_sum_fast(mine)) / static_cast<double>(d) + eps));
  }
  const double sum = block_sum_squares(x, d);
  return static_cast<float>(1.0 / sqrt(sum / static_cast<double>(d) + eps));
}

// Larger is better; NaN counts as -infinity, both zeros are equal, and 0 is below everything.
__device__ __forceinline__ uint32_t rank_of(float score) {
  if (isnan(score)) score = -INFINITY;
  if (score == 0.0f) score = 0.0f;
  const uint32_t u = __float_as_uint(score);
  return (u & 0x80000000u) != 0 ? ~u : u | 0x80000000u;
}

// bf16(x) as a float; NaN stays NaN.
__device__ __forceinline__ float round_bf16(float x) {
  const uint32_t u = __float_as_uint(x);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return __uint_as_float(((u >> 16) | 0x40u) << 16);
  return __uint_as_float((u + 0x7FFFu + ((u >> 16) & 1u)) & 0xFFFF0000u);
}

}  // namespace espalier::ops::cuda
