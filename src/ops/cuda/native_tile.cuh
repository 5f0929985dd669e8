// Tiles of native weights as floats in shared memory, transposed: [depth of k][columns of out]. Device code only.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "ops/cuda/native_weight.h"

namespace espalier::ops::cuda {

__device__ __forceinline__ float value_of_e4m3(uint32_t code) {
  const uint32_t magnitude = code & 0x7Fu;
  const float v = magnitude < 8 ? static_cast<float>(magnitude) * 0x1.0p-9f : __uint_as_float((magnitude << 20) + (120u << 23));
  return (code & 0x80u) != 0 ? -v : v;
}

__device__ __forceinline__ float value_of_e8m0(uint32_t code) { return code == 0 ? 0x1.0p-127f : __uint_as_float(code << 23); }

// 0, 0.5, 1, 1.5, 2, 3, 4, 6; code 8 is 0.
__device__ __forceinline__ float value_of_e2m1(uint32_t code) {
  const uint32_t m = code & 7u;
  const float v = m < 2 ? 0.5f * static_cast<float>(m) : __uint_as_float(((m >> 1) + 126u) << 23 | (m & 1u) << 22);
  return (code & 8u) != 0 && m != 0 ? -v : v;
}

// Element (o, i) of the matrix.
__device__ inline float native_value(const NativeWeight& w, int64_t o, int64_t i) {
  switch (w.form) {
    case NativeForm::kF32: return reinterpret_cast<const float*>(w.weight)[o * w.in + i];
    case NativeForm::kF16: return __half2float(reinterpret_cast<const __half*>(w.weight)[o * w.in + i]);
    case NativeForm::kBf16: return __uint_as_float(static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(w.weight)[o * w.in + i]) << 16);
    case NativeForm::kFp8: {
      const float s = value_of_e8m0(w.scale[(w.row_begin + o) / w.block_rows * w.scale_cols + i / w.block_cols]);
      return value_of_e4m3(w.weight[o * w.in + i]) * s;
    }
    case NativeForm::kMxfp4: {
      const float s = value_of_e8m0(w.scale[o * w.scale_cols + i / 32]);
      const uint32_t byte = w.weight[o * (w.in / 2) + i / 2];
      return value_of_e2m1(i % 2 == 0 ? byte & 15u : byte >> 4) * s;
    }
  }
  return 0.0f;
}

// Four elements (o, i .. i + 3), i a multiple of 4, all inside one block of scales; `in` a multiple of 4.
__device__ inline void native_values(const NativeWeight& w, int64_t o, int64_t i, float (&v)[4]) {
  const int64_t at = o * w.in + i;
  switch (w.form) {
    case NativeForm::kF32: {
      const float4 x = *reinterpret_cast<const float4*>(w.weight + 4 * at);
      v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
      return;
    }
    case NativeForm::kF16:
    case NativeForm::kBf16: {
      const uint2 x = *reinterpret_cast<const uint2*>(w.weight + 2 * at);
      const uint16_t bits[4] = {static_cast<uint16_t>(x.x), static_cast<uint16_t>(x.x >> 16), static_cast<uint16_t>(x.y),
                                static_cast<uint16_t>(x.y >> 16)};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        v[j] = w.form == NativeForm::kBf16 ? __uint_as_float(static_cast<uint32_t>(bits[j]) << 16) : __half2float(__ushort_as_half(bits[j]));
      }
      return;
    }
    case NativeForm::kFp8: {
      const float s = value_of_e8m0(w.scale[(w.row_begin + o) / w.block_rows * w.scale_cols + i / w.block_cols]);
      const uint32_t x = *reinterpret_cast<const uint32_t*>(w.weight + at);
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = value_of_e4m3(x >> (8 * j) & 255u) * s;
      return;
    }
    case NativeForm::kMxfp4: {
      const float s = value_of_e8m0(w.scale[o * w.scale_cols + i / 32]);
      const uint32_t x = *reinterpret_cast<const uint16_t*>(w.weight + at / 2);
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = value_of_e2m1(x >> (4 * j) & 15u) * s;
      return;
    }
  }
}

// tile[kDepth][kStride] := elements k0 .. k0 + kDepth - 1 of outputs column0 .. column0 + kColumns - 1, zero outside the matrix. kThreads
// threads call it, each with its number.
template <int kDepth, int kColumns, int kStride, int kThreads>
__device__ void load_native_tile(const NativeWeight& w, int64_t k0, int64_t column0, int thread, float* tile) {
  const bool in_fours = w.in % 4 == 0 && (w.form != NativeForm::kFp8 || w.block_cols % 4 == 0);
  if (in_fours) {
    for (int at = thread; at < kColumns * (kDepth / 4); at += kThreads) {
      const int c = at / (kDepth / 4), kk = at % (kDepth / 4) * 4;
      float v[4] = {};
      if (column0 + c < w.out && k0 + kk < w.in) native_values(w, column0 + c, k0 + kk, v);
#pragma unroll
      for (int j = 0; j < 4; ++j) tile[(kk + j) * kStride + c] = v[j];
    }
    return;
  }
  for (int at = thread; at < kColumns * kDepth; at += kThreads) {
    const int c = at / kDepth, kk = at % kDepth;
    tile[kk * kStride + c] = column0 + c < w.out && k0 + kk < w.in ? native_value(w, column0 + c, k0 + kk) : 0.0f;
  }
}

}  // namespace espalier::ops::cuda
