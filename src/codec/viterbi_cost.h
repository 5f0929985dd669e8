// The arithmetic of the search's costs, number by number: the definition that every SIMD tier must equal. Internal to the codec.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "codec/codebook.h"

namespace espalier::codec {

// How a difference d becomes the error of a step: K < 4 d^2/32768 rounded; K = 4 the same of 2d, doubled with
// saturation; K >= 5 min(|d|, 255)^2.
enum class CostRule : uint8_t { kSquare, kDoubled, kClipped };

constexpr CostRule cost_rule(int k2) { return k2 >= 10 ? CostRule::kClipped : k2 == 8 ? CostRule::kDoubled : CostRule::kSquare; }

// Codes and targets are rounded to multiples of 1/unit. K <= 4: the whole codebook and some headroom fit int16 (mul1 reaches
// 3.46, the others 3.98). K >= 5: the root mean square error of a step is about 32 units, saturation at 255 is eight times that.
constexpr int cost_unit(int k2, Codebook codebook) {
  if (k2 >= 10) return 1024 << (k2 / 2 - 5);
  return codebook == Codebook::kMul1 ? 8192 : 6144;
}

constexpr int clamp_i16(int x) { return x < -32768 ? -32768 : x > 32767 ? 32767 : x; }

// The difference wraps modulo 2^16 (plain subtraction runs on more pipes than the saturating one). It can wrap only for
// |code - w| of at least 4 units, and then the wrapped error is still far above what a good path pays; a path that takes such a
// step anyway is caught by is_inexact.
constexpr int integer_difference(CostRule rule, int16_t code, int16_t w) {
  const int d = static_cast<int16_t>(static_cast<uint16_t>(code) - static_cast<uint16_t>(w));
  return rule == CostRule::kDoubled ? clamp_i16(2 * d) : d;
}

constexpr uint16_t integer_error(CostRule rule, int16_t code, int16_t w) {
  const int d = integer_difference(rule, code, w);
  if (rule == CostRule::kClipped) {
    const int a = std::min(d < 0 ? -d : d, 255);
    return static_cast<uint16_t>(a * a);
  }
  return static_cast<uint16_t>((d * d + 16384) >> 15);
}

// True when the error of this step is not the rounded square of the difference.
constexpr bool is_inexact(CostRule rule, int16_t code, int16_t w) {
  const int d = code - w;
  const int limit = rule == CostRule::kClipped ? 255 : rule == CostRule::kDoubled ? 16384 : 32767;
  return d <= -limit || d >= limit;
}

constexpr uint16_t saturating_add(uint16_t a, uint16_t b) {
  return static_cast<uint16_t>(std::min<int>(int{a} + int{b}, 65535));
}

inline float float_error(float code, float w) {
  const float d = code - w;
  return d * d;
}

}  // namespace espalier::codec
