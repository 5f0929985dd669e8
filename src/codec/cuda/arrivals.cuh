// Sums that travel between blocks of one launch without fences or flags: a place holds a pattern that no sum has until the sum
// arrives, and again after it has been read, so the value is its own flag.
//
// Who finishes is decided by a counter that everyone raises when he begins: the last has seen all others begin, so waiting for their
// sums ends whatever else runs on the GPU. Each 32- or 64-bit element is one relaxed access; nothing is concluded from one element
// about another.
// Source: docs/decisions/cuda-exl3-kernels.md.
#pragma once

#include <cstdint>

namespace espalier::codec::cuda {

// Bytes that mark an empty place. Of floats: arithmetic gives no such NaN (the one it gives is 0x7FFFFFFF). Of integers: sums stay
// below (experts_stream.cuh).
inline constexpr int kEmptyFloatByte = 0xFF, kEmptyIntegerByte = 0x80;
inline constexpr uint32_t kEmptyFloat = 0xFFFFFFFFu, kEmptyInteger = 0x80808080u;
inline constexpr uint64_t kEmptyInteger64 = 0x8080808080808080u;

#if defined(__CUDACC__)

__device__ __forceinline__ uint4 load_relaxed(const void* from) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ ulonglong2 load_relaxed_64(const void* from) {
  ulonglong2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0,%1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ void store_relaxed(void* to, const uint4& v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void store_relaxed(void* to, const uint2& v) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1,%2};" ::"l"(to), "r"(v.x), "r"(v.y) : "memory");
}
__device__ __forceinline__ void store_relaxed(void* to, uint64_t v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
}
__device__ __forceinline__ uint4 filled(uint32_t pattern) { return {pattern, pattern, pattern, pattern}; }
__device__ __forceinline__ bool has_none(const uint4& v, uint32_t pattern) {
  return v.x != pattern && v.y != pattern && v.z != pattern && v.w != pattern;
}

#endif

}  // namespace espalier::codec::cuda
