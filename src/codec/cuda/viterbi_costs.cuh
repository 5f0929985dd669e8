// The cost arithmetic of viterbi_cost.h on the fp32 pipes of a GPU, bit for bit. Internal to the GPU search.
//
// A cost C is kept as the float B + C*U + U/2 with U = 2^15 (2^13 for doubled differences) and B = 2^17 U. For a code
// and a target that differ by d, fma(d, d, cost) rounded towards zero is then B + (C + floor(d^2/U + 1/2))*U plus a
// fraction of U below the cost's lowest bit: squaring, rounding to an integer and adding take one instruction, 16 bits
// never overflow (the float has room for 17), and saturation is a minimum at the end. Positive floats are compared as
// integers, three at a time. For K >= 5 a cost is the plain float C, which is exact up to 2^24.
//
// What this leaves out is where a 16-bit difference wraps or is clamped; see `limit_distance` and search steps.
#pragma once

#include <cstdint>

#include "codec/viterbi_cost.h"

namespace espalier::codec::cuda {

inline constexpr int kMostCost = 65535;
inline constexpr float kCodeBias = 8388608.0f + 32768.0f;  // a code is unpacked as the float 2^23 + (code + 32768)

template <CostRule kRule>
struct CostFloat {
  static constexpr bool kIsPlain = kRule == CostRule::kClipped;
  static constexpr int kBase = kRule == CostRule::kDoubled ? 0x4E800000 : 0x4F800000;       // 2^30, 2^32
  static constexpr int kSaturated = kIsPlain ? 0x477FFF00 : kBase | (kMostCost << 6) | 63;  // 65535

  static __device__ int encode(int cost) {
    return kIsPlain ? __float_as_int(static_cast<float>(cost)) : kBase | (cost << 6) | 32;
  }
  static __device__ int decode(int bits) {
    return kIsPlain ? static_cast<int>(__int_as_float(bits)) : (bits >> 6) & 0xFFFF;
  }
  // cost + error of a step; the fraction stays until `finish`.
  static __device__ int extend(float cost, float d) {
    return __float_as_int(kIsPlain ? __fmaf_rn(d, d, cost) : __fmaf_rz(d, d, cost));
  }
  static __device__ int finish(int bits) { return kIsPlain ? bits : (bits & ~63) | 32; }
};

// Integer errors are smaller than the real square only at steps whose difference wraps or is clamped, and then they are
// those of at least this distance. `least` and `most` are the ends of the codes in question. kWide: the arithmetic
// wraps itself.
template <CostRule kRule, bool kWide>
__device__ inline float limit_distance(float w, float least, float most) {
  const float farthest = w >= 0 ? w - least : most - w;
  const float wrapped = kWide ? 65536.0f : 65536.0f - farthest;
  return kRule == CostRule::kDoubled ? fminf(wrapped, 16383.0f) : wrapped;
}

// With s = unpacked code - wide_bias(w), the wrapped difference is |s| - 2^15 up to its sign: s is the difference moved
// by 2^15 away from the side on which it can wrap.
__device__ inline float wide_bias(float w) {
  return kCodeBias + w + (w >= 0 ? -32768.0f : 32768.0f);
}

__device__ inline int min3(int a, int b, int c) {
  return __vimin3_s32(a, b, c);
}
__device__ inline int max3(int a, int b, int c) {
  return __vimax3_s32(a, b, c);
}

}  // namespace espalier::codec::cuda
