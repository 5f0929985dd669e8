// What the EXL3 kernels share: loads of packed blocks, the int8 tensor instruction, products of states, the warp's rotation and
// quantization of 128 activations. Device code only; the layout is explained in windows.h.
//
// Arithmetic (exact integers until one fp32 step): a weight is kSlope * (sum - kOffset) with sum the byte sum of state * multiplier,
// so sum * a is four u8 x s8 products. An activation is d * (a + e / 254) with two int8 digits, main a and residual e.
// Source: docs/decisions/cuda-exl3-kernels.md.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "codec/codebook.h"
#include "codec/cuda/windows.h"
#include "codec/hadamard.h"

namespace espalier::codec::cuda {

inline constexpr int kChunk = 128;        // rows that share a quantization scale at most, and a Hadamard block
inline constexpr int kChunkPairs = kChunk / kPairRows;
inline constexpr int kSetRows = 4;        // rows of one B operand: columns 2r, 2r + 1 are main and residual of row r
inline constexpr int kPairBytes = 64;     // quantized bytes of one row and pair: [main, residual][4 lanes of k][8]
inline constexpr int kChunkBytes = kChunkPairs * kPairBytes;
inline constexpr float kSlope = 0.00676727294921875f;  // half(0x1EEE)
inline constexpr int kWholeOffset = 510;
inline constexpr float kRestOffset = 0.26832f;         // (10.3828125 / slope - 1024) - 510
inline constexpr int kResidualUnits = 254;

// k2 words of lane `lane` of the block at `block`; streamed once, so kept out of L1.
template <int k2>
__device__ __forceinline__ void load_block(const uint32_t* block, int lane, uint32_t (&w)[k2]) {
#pragma unroll
  for (int j = 0; j < k2 / 4; ++j) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w[4 * j]), "=r"(w[4 * j + 1]), "=r"(w[4 * j + 2]), "=r"(w[4 * j + 3])
                 : "l"(block + 128 * j + 4 * lane));
  }
  constexpr int quads = 4 * (k2 / 4), rest = k2 % 4;
  if constexpr (rest >= 2) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];"
                 : "=r"(w[quads]), "=r"(w[quads + 1])
                 : "l"(block + 32 * quads + 2 * lane));
  }
  if constexpr (rest % 2 == 1) {
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];"
                 : "=r"(w[k2 - 1])
                 : "l"(block + 32 * (quads + rest - 1) + lane));
  }
}

// d += a * b: a 16 columns x 32 bytes (u8), b 32 bytes x 8 (s8), exact.
__device__ __forceinline__ void mma_u8s8(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Byte i of x four times.
template <int i>
__device__ __forceinline__ uint32_t splat(uint32_t x) {
  return __byte_perm(x, 0, 0x1111 * i);
}

// One block (32 rows x 64 columns) times kSets operands of 4 rows: acc[set][n-tile] += ...; b[set]: this lane's 8 bytes;
// end(nt): a word with the ring neighbour's end of n-tile nt, in its high half for odd nt if kPacked, else in its low half.
// acc of lane l: main and residual of row l%4 for column l/4, then for column l/4 + 8.
template <int k2, int kSets, bool kPacked, typename End>
__device__ __forceinline__ void multiply_tiles(const uint32_t (&w)[k2], const uint2 (&b)[kSets], End end,
                                               int (&acc)[kSets][kGroupTiles][4]) {
  uint32_t splats[kSets][8];
#pragma unroll
  for (int s = 0; s < kSets; ++s) {
    splats[s][0] = splat<0>(b[s].x), splats[s][1] = splat<1>(b[s].x), splats[s][2] = splat<2>(b[s].x), splats[s][3] = splat<3>(b[s].x);
    splats[s][4] = splat<0>(b[s].y), splats[s][5] = splat<1>(b[s].y), splats[s][6] = splat<2>(b[s].y), splats[s][7] = splat<3>(b[s].y);
  }
#pragma unroll
  for (int nt = 0; nt < kGroupTiles; ++nt) {
    uint32_t string[string_words(k2)];
    bit_string<k2>(w, end(nt), kPacked && nt % 2 != 0, nt, string);
    uint32_t p[kPositions];
#pragma unroll
    for (int i = 0; i < kPositions; ++i) p[i] = window<k2>(string, i) * kMul1Multiplier;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int i = 2 * (m & 1) + 8 * (m >> 1);
#pragma unroll
      for (int s = 0; s < kSets; ++s) {
        mma_u8s8(acc[s][nt], p[i], p[i + 4], p[i + 1], p[i + 5], splats[s][2 * m], splats[s][2 * m + 1]);
      }
    }
  }
}

// The same with the ends exchanged between lanes.
template <int k2, int kSets>
__device__ __forceinline__ void multiply_block(const uint32_t (&w)[k2], const uint2 (&b)[kSets], int neighbour,
                                               int (&acc)[kSets][kGroupTiles][4]) {
  uint32_t ends[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) ends[half] = __shfl_sync(0xFFFFFFFFu, pack_ends<k2>(w, half), neighbour);
  multiply_tiles<k2, kSets, true>(w, b, [&](int nt) { return ends[nt / 2]; }, acc);
}

// The same for a block in shared memory, where the neighbour's words are as near as one's own.
template <int k2>
__device__ __forceinline__ void multiply_shared_block(const uint32_t* block, int lane, const uint2& digits, int (&acc)[1][kGroupTiles][4]) {
  constexpr int quads = 4 * whole_words(k2), rest = k2 % 4;
  uint32_t w[k2];
#pragma unroll
  for (int j = 0; j < whole_words(k2); ++j) {
    const uint4 v = *reinterpret_cast<const uint4*>(block + 128 * j + 4 * lane);
    w[4 * j] = v.x, w[4 * j + 1] = v.y, w[4 * j + 2] = v.z, w[4 * j + 3] = v.w;
  }
  if constexpr (rest >= 2) {
    const uint2 v = *reinterpret_cast<const uint2*>(block + 32 * quads + 2 * lane);
    w[quads] = v.x, w[quads + 1] = v.y;
  }
  if constexpr (rest % 2 == 1) w[k2 - 1] = block[32 * (quads + rest - 1) + lane];
  const uint2 b[1] = {digits};
  if constexpr (whole_words(k2) > 0) {
    const uint4 v = *reinterpret_cast<const uint4*>(block + 128 * (whole_words(k2) - 1) + 4 * ring_neighbour(lane));
    const uint32_t ends[4] = {v.x, v.y, v.z, v.w};
    multiply_tiles<k2, 1, false>(w, b, [&](int nt) { return ends[nt]; }, acc);
  } else {
    multiply_block<k2, 1>(w, b, ring_neighbour(lane), acc);
  }
}

// Asynchronous copies of 16 bytes into shared memory, in groups.
__device__ __forceinline__ void copy_async(uint32_t shared_to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_to), "l"(from) : "memory");
}
__device__ __forceinline__ void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// The 128-point rotation of a warp: lane l holds elements 4l .. 4l+3; distances 1, 2, 4, ... 64 as hadamard.h, then the constant.
__device__ __forceinline__ void rotate_chunk(float (&v)[4], int lane) {
  const float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
  v[0] = a + c, v[1] = b + d, v[2] = a - c, v[3] = b - d;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float sign = (lane & distance) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = __fmaf_rn(v[j], sign, __shfl_xor_sync(0xFFFFFFFFu, v[j], distance));  // other +- own, exact product
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) v[j] *= kHadamardScale;
}

// Largest magnitude of the warp's 128 values; larger than every finite number when one is NaN or infinite.
__device__ __forceinline__ float chunk_max(const float (&v)[4]) {
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) bits = max(bits, __float_as_uint(v[j]) & 0x7FFFFFFFu);
  return __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, bits));
}

// Digits of a lane's four values v / d, packed as bytes, and the chunk's sums of digits (in every lane).
struct Digits {
  uint32_t main, residual;
  int sum_main, sum_residual;
};

__device__ __forceinline__ Digits digits_of(const float (&v)[4], float per_unit) {
  Digits out = {0, 0, 0, 0};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float t = fminf(fmaxf(v[j] * per_unit, -127.0f), 127.0f);
    const float whole = rintf(t);
    const int a = static_cast<int>(whole), e = static_cast<int>(rintf((t - whole) * kResidualUnits));
    out.main |= (static_cast<uint32_t>(a) & 255u) << (8 * j);
    out.residual |= (static_cast<uint32_t>(e) & 255u) << (8 * j);
    out.sum_main += a;
    out.sum_residual += e;
  }
  out.sum_main = __reduce_add_sync(0xFFFFFFFFu, out.sum_main);
  out.sum_residual = __reduce_add_sync(0xFFFFFFFFu, out.sum_residual);
  return out;
}

// Writes a chunk's digits in operand order to `to` [4 pairs][main, residual][4][8] (256 bytes, shared or global).
// The eight bytes of k-lane q are rows 16 (q/2) + 4 (q%2) + {0, 1, 8, 9, 2, 3, 10, 11} of the pair. Lanes l and l^2 hold rows 8 apart:
// one exchange gives the first both mains and the second both residuals.
__device__ __forceinline__ void store_digits(const Digits& digits, int lane, uint8_t* to) {
  const bool upper = (lane & 2) != 0;
  const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, upper ? digits.main : digits.residual, 2);
  const uint32_t low = upper ? other : digits.main, high = upper ? digits.residual : other;
  uint2 bytes;
  bytes.x = __byte_perm(low, high, 0x5410);
  bytes.y = __byte_perm(low, high, 0x7632);
  const int pair = lane / 8, q = 2 * (lane % 8 / 4) + lane % 2;
  *reinterpret_cast<uint2*>(to + pair * kPairBytes + (upper ? 32 : 0) + 8 * q) = bytes;
}

__device__ __forceinline__ float half_bits_to_float(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }

// Elements 4l .. 4l+3 of a chunk of fp16 scales.
__device__ __forceinline__ float4 load_scales(const uint16_t* scales, int lane) {
  const uint2 raw = __ldg(reinterpret_cast<const uint2*>(scales) + lane);
  return {half_bits_to_float(static_cast<uint16_t>(raw.x)), half_bits_to_float(static_cast<uint16_t>(raw.x >> 16)),
          half_bits_to_float(static_cast<uint16_t>(raw.y)), half_bits_to_float(static_cast<uint16_t>(raw.y >> 16))};
}

// Dependent launch: what comes before may overlap the kernel before this one in the stream; what comes after sees its results.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace espalier::codec::cuda
