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
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t LaneIndex __attribute__((vector_size(4 * kLanes)));

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
  constexpr int kRegisters = kBlock / kLanes;
  for (int r = 0; r < kRegisters; ++r) {
    v[r] = butterfly<2>(butterfly<1>(v[r]));
    if constexpr (kLanes > 4) v[r] = butterfly<4>(v[r]);
    if constexpr (kLanes > 8) v[r] = butterfly<8>(v[r]);
  }
  for (int h = 1; h < kRegisters; h *= 2) {
    for (int i = 0; i < kRegisters; i += 2 * h) {
      for (int j = i; j < i + h; ++j) {
        const Lanes a = v[j];
        const Lanes b = v[j + h];
        v[j] = a + b;
        v[j + h] = a - b;
      }
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

// See Int8Kernels::quantize.
void quantize_rows(const uint16_t* suh, const float* x, int64_t stride, int64_t rows, Int8Form form,
                   const Int8Output& out) {
  const bool with_residual = form == Int8Form::kResidualWords;
  const double steps = with_residual ? 254 : 1;  // of the integers in one d
  alignas(64) float scales[kChunk];
  widen_scales(suh, scales);
  for (int64_t r = 0; r < rows; ++r) {
    alignas(64) float v[kChunk];
    for (int i = 0; i < kChunk; ++i) v[i] = x[r * stride + i] * scales[i];
    rotate128(reinterpret_cast<Lanes*>(v));
    int32_t largest = 0;
    for (int i = 0; i < kChunk; ++i) {
      v[i] *= kHadamardScale;
      largest = std::max(largest, std::bit_cast<int32_t>(v[i]) & 0x7FFFFFFF);
    }
    uint64_t* quads = out.quads + r * kQuadsPerChunk;
    const float max = std::bit_cast<float>(largest);
    if (largest == 0 || largest >= 0x7F800000) {
      std::fill(quads, quads + kQuadsPerChunk, uint64_t{0});
      out.scale[r] = out.shift[r] = largest == 0 ? 0.0f : std::numeric_limits<float>::quiet_NaN();
      out.centre[r] = 0;
      continue;
    }
    const float boost = max < kTiny ? kBoost : 1.0f;  // exact
    const float inverse = 127.0f / (max * boost);
    int16_t q[kChunk];
    if (with_residual) {
      for (int i = 0; i < kChunk; ++i) {
        const float t = v[i] * boost * inverse;
        const float main = std::rint(t);
        const float residual = std::rint(254.0f * (t - main));
        q[i] = static_cast<int16_t>(static_cast<int32_t>(254.0f * main + residual));
      }
    } else {
      for (int i = 0; i < kChunk; ++i)
        q[i] = static_cast<int16_t>(static_cast<int32_t>(std::rint(v[i] * boost * inverse)));
    }
    int32_t sum = 0;
    for (int i = 0; i < kChunk; ++i) sum += q[i];
    if (form == Int8Form::kPlainBytes) {
      for (int i = 0; i < kChunk; ++i) q[i] = static_cast<int16_t>((q[i] & 0xFF) * 0x101);
    }
    for (int p = 0; p < kQuadsPerChunk; ++p) {  // rows 2t, 2t+1 and 2t+8, 2t+9 of tile p / 4
      const int16_t* pair = q + p / 4 * kTile + p % 4 * 2;
      std::memcpy(reinterpret_cast<char*>(quads + p), pair, 4);
      std::memcpy(reinterpret_cast<char*>(quads + p) + 4, pair + 8, 4);
    }
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
    alignas(64) float v[kBlock];
    std::memcpy(v, z + r * kBlock, sizeof v);
    rotate128(reinterpret_cast<Lanes*>(v));
    for (int c = 0; c < kBlock; ++c) y[r * stride + c] = v[c] * kHadamardScale * scales[c];
  }
}

}  // namespace
}  // namespace espalier::codec
