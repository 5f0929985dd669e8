// What the row kernels share: sums in 16 double lanes with the fixed tree of ops/rms_norm.h, and launch sizes. Device code only.
//
// The order of every sum is that of ops/cpu/kernels_inl.h, and device code is compiled without contraction, so results have the
// CPU's bits. Nothing here depends on the number of blocks, rows or threads.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

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
// The values pass through shared memory, because 16 threads alone would wait for every load. The result is in thread 0.
__device__ inline double block_sum_squares(const float* x, int64_t n) {
  constexpr int kPiece = 4096;
  __shared__ float piece[kPiece];
  double sum = 0;
  for (int64_t begin = 0; begin < n; begin += kPiece) {
    const int size = static_cast<int>(n - begin < kPiece ? n - begin : kPiece);
    for (int i = static_cast<int>(threadIdx.x); i < size; i += static_cast<int>(blockDim.x)) piece[i] = x[begin + i];
    __syncthreads();
    if (threadIdx.x < 16) {
#pragma unroll 8
      for (int i = static_cast<int>(threadIdx.x); i < size; i += 16) {
        const double v = static_cast<double>(piece[i]);
        sum = sum + v * v;
      }
    }
    __syncthreads();
  }
  return threadIdx.x < 16 ? tree_of_16(sum, 0x0000FFFFu) : 0.0;
}

// r of ops/rms_norm.h, in thread 0 of the block.
__device__ inline float block_inverse_rms(const float* x, int64_t d, double eps) {
  const double sum = block_sum_squares(x, d);
  return static_cast<float>(1.0 / sqrt(sum / static_cast<double>(d) + eps));
}

// bf16(x) as a float; NaN stays NaN.
__device__ __forceinline__ float round_bf16(float x) {
  const uint32_t u = __float_as_uint(x);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return __uint_as_float(((u >> 16) | 0x40u) << 16);
  return __uint_as_float((u + 0x7FFFu + ((u >> 16) & 1u)) & 0xFFFF0000u);
}

}  // namespace espalier::ops::cuda
