// Rotation and quantization around the integer product, included once per instruction set (into an unnamed namespace of
// the kernels' file) so that each gets its own width of vectors. Every operation is one IEEE operation per element in
// the order of codec/matmul.h and codec/int8_matmul.h, so all widths give the same bits.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "codec/hadamard.h"
#include "codec/int8_matmul_kernels.h"

namespace espalier::codec {
namespace {

// v = kSlope * s + kOffset up to the rounding to fp16 (fp16 0x1EEE and 1024 * 0x1EEE + 0xC931), both exact.
constexpr double kSlope = 0.00676727294921875;
constexpr double kOffset = 1024 * kSlope - 10.3828125;
constexpr double kCentredOffset = kOffset + kSumCentre * kSlope;  // v = kSlope * (s - 510) + this

constexpr float kTiny = 0x1.0p-60f;  // below it 127 / max could overflow
constexpr float kBoost = 0x1.0p80f;

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kRegisters = kBlock / kLanes;
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t LaneIndex __attribute__((vector_size(4 * kLanes)));
typedef int16_t LaneWords __attribute__((vector_size(2 * kLanes)));
typedef int32_t Eight __attribute__((vector_size(32)));

// The butterfly over distance kDistance inside a register: a + b in the lower lane of each pair, a - b in the upper
// one.
template <int kDistance>
inline Lanes butterfly(Lanes v) {
  LaneIndex partner, upper;
  for (int i = 0; i < kLanes; ++i) {
    partner[i] = i ^ kDistance;
    upper[i] = (i & kDistance) != 0 ? -1 : 0;
  }
#if defined(__clang__)
  Lanes other;
  for (int i = 0; i < kLanes; ++i) other[i] = v[partner[i]];
#else
  const Lanes other = __builtin_shuffle(v, partner);
#endif
  return upper ? other - v : v + other;
}

// hadamard128_sum: distances 1, 2, 4, ... 64.
inline void rotate128(Lanes* v) {
#pragma GCC unroll 32
  for (int r = 0; r < kRegisters; ++r) {
    v[r] = butterfly<2>(butterfly<1>(v[r]));
    if constexpr (kLanes > 4) v[r] = butterfly<4>(v[r]);
    if constexpr (kLanes > 8) v[r] = butterfly<8>(v[r]);
  }
#pragma GCC unroll 8
  for (int h = 1; h < kRegisters; h *= 2) {
#pragma GCC unroll 32
    for (int j = 0; j < kRegisters; ++j) {
      if ((j & h) != 0) continue;
      const Lanes a = v[j];
      const Lanes b = v[j + h];
      v[j] = a + b;
      v[j + h] = a - b;
    }
  }
}

// Finite fp16 -> float, exact.
inline void widen_scales(const uint16_t* bits, float* out) {
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t magnitude = static_cast<uint32_t>(bits[i] & 0x7FFF) << 13;
    const uint32_t sign = static_cast<uint32_t>(bits[i] & 0x8000) << 16;
    const float value = std::bit_cast<float>(magnitude) * 0x1.0p112f;
    out[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
  }
}

// The nearest integer, ties to even, of a number below 2^22: exact, and vector code everywhere.
constexpr float kRoundingShift = 0x1.8p23f;

// Integers [128] of a chunk, below 2^15, as the products want them.
inline void write_quads(const LaneIndex* q, Int8Form form, uint64_t* quads) {
  alignas(64) int32_t dwords[kChunk];
  if (form == Int8Form::kPlainSplats) {
    for (int r = 0; r < kRegisters; ++r) {
      const LaneIndex splats = (q[r] & 0xFF) * 0x01010101;
      std::memcpy(dwords + r * kLanes, &splats, sizeof splats);
    }
    for (int t = 0; t < kChunk / kTile; ++t) {  // rows 2t, 2t+1 and 2t+8, 2t+9 side by side
      Eight low, high;
      std::memcpy(&low, dwords + t * kTile, sizeof low);
      std::memcpy(&high, dwords + t * kTile + 8, sizeof high);
      const Eight first = __builtin_shufflevector(low, high, 0, 1, 8, 9, 2, 3, 10, 11);
      const Eight second = __builtin_shufflevector(low, high, 4, 5, 12, 13, 6, 7, 14, 15);
      std::memcpy(quads + 8 * t, &first, sizeof first);
      std::memcpy(quads + 8 * t + 4, &second, sizeof second);
    }
    return;
  }
  for (int r = 0; r < kRegisters; ++r) {
    const LaneIndex v = form == Int8Form::kPlainBytes ? (q[r] & 0xFF) * 0x101 : q[r];
    const LaneWords words = __builtin_convertvector(v, LaneWords);
    std::memcpy(reinterpret_cast<char*>(dwords) + r * sizeof words, &words, sizeof words);
  }
  for (int t = 0; t < kChunk / kTile; ++t) {
    Eight pairs;
    std::memcpy(&pairs, dwords + t * 8, sizeof pairs);
    pairs = __builtin_shufflevector(pairs, pairs, 0, 4, 1, 5, 2, 6, 3, 7);
    std::memcpy(quads + 4 * t, &pairs, sizeof pairs);
  }
}

inline int32_t bits_of_largest(const Lanes* v) {
  LaneIndex largest = {};
  for (int r = 0; r < kRegisters; ++r) {
    const LaneIndex bits = reinterpret_cast<LaneIndex>(v[r]) & 0x7FFFFFFF;
    largest = bits > largest ? bits : largest;
  }
  int32_t result = 0;
  for (int i = 0; i < kLanes; ++i) result = std::max(result, largest[i]);
  return result;
}

// See Int8Kernels::quantize.
void quantize_rows(const uint16_t* suh, const float* x, int64_t stride, int64_t rows, Int8Form form,
                   const Int8Output& out) {
  const bool with_residual = form == Int8Form::kResidualWords;
  const double steps = with_residual ? 254 : 1;  // of the integers in one d
  alignas(64) float scales[kChunk];
  widen_scales(suh, scales);
  for (int64_t r = 0; r < rows; ++r) {
    Lanes v[kRegisters];
    for (int i = 0; i < kRegisters; ++i) {
      Lanes scale;
      std::memcpy(&v[i], x + r * stride + i * kLanes, sizeof(Lanes));
      std::memcpy(&scale, scales + i * kLanes, sizeof(Lanes));
      v[i] = v[i] * scale;
    }
    rotate128(v);
    for (Lanes& lanes : v) lanes *= kHadamardScale;
    const int32_t largest = bits_of_largest(v);
    uint64_t* quads = out.quads + r * quads_size(form);
    const float max = std::bit_cast<float>(largest);
    if (largest == 0 || largest >= 0x7F800000) {
      std::fill(quads, quads + quads_size(form), uint64_t{0});
      out.scale[r] = out.shift[r] = largest == 0 ? 0.0f : std::numeric_limits<float>::quiet_NaN();
      out.centre[r] = 0;
      continue;
    }
    const float boost = max < kTiny ? kBoost : 1.0f;  // exact
    const float inverse = 127.0f / (max * boost);
    LaneIndex q[kRegisters];
    LaneIndex sums = {};
    for (int i = 0; i < kRegisters; ++i) {
      const Lanes t = v[i] * boost * inverse;
      Lanes whole = (t + kRoundingShift) - kRoundingShift;
      if (with_residual) {
        const Lanes residual = (254.0f * (t - whole) + kRoundingShift) - kRoundingShift;
        whole = 254.0f * whole + residual;
      }
      q[i] = __builtin_convertvector(whole, LaneIndex);
      sums += q[i];
    }
    int32_t sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += sums[i];
    write_quads(q, form, quads);
    const double d = static_cast<double>(max) / (127 * steps);
    out.scale[r] = static_cast<float>(d * kSlope);
    out.shift[r] = static_cast<float>(d * kCentredOffset * sum);
    out.centre[r] = kSumCentre * sum;  // at most 510 * 32385 * 128 < 2^31
  }
}

// See Int8Kernels::rotate.
void rotate_rows(const uint16_t* svh, const float* z, int64_t rows, float* y, int64_t stride) {
  alignas(64) float scales[kBlock];
  widen_scales(svh, scales);
  for (int64_t r = 0; r < rows; ++r) {
    Lanes v[kRegisters];
    std::memcpy(v, z + r * kBlock, sizeof v);
    rotate128(v);
    for (int i = 0; i < kRegisters; ++i) {
      Lanes scale;
      std::memcpy(&scale, scales + i * kLanes, sizeof scale);
      scale = v[i] * kHadamardScale * scale;
      std::memcpy(y + r * stride + i * kLanes, &scale, sizeof scale);
    }
  }
}

}  // namespace
}  // namespace espalier::codec
