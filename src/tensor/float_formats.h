// Small float formats, bit exact: bf16, f16, e4m3fn, e8m0 (ue8m0), e2m1.
//
// decode_*: bits -> float, exact. encode_*: float -> bits, round to nearest even, saturating where the format has no infinity.
// Sources: OCP MX v1.0 (e4m3, e8m0, e2m1); IEEE 754 (f16); spec of the checkpoint (docs/formats/checkpoint.md).
// Threads: pure.
#pragma once

#include <bit>
#include <cstdint>

namespace espalier {

inline float decode_bf16(uint16_t b) { return std::bit_cast<float>(static_cast<uint32_t>(b) << 16); }

// Round to nearest even; NaN stays NaN.
inline uint16_t encode_bf16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

// bf16(x) as a float.
inline float round_bf16(float x) { return decode_bf16(encode_bf16(x)); }

inline float decode_f16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 31u;
  const uint32_t mantissa = h & 0x3FFu;
  if (exponent == 31u) return std::bit_cast<float>(sign | 0x7F800000u | (mantissa << 13));
  if (exponent != 0u) return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1.0p-24f;  // subnormal or zero
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

// Round to nearest even; overflow becomes infinity, NaN stays NaN.
inline uint16_t encode_f16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  const uint32_t a = u & 0x7FFFFFFFu;
  if (a > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (a >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // >= 65520 rounds to infinity
  if (a < 0x38800000u) {                                               // below the smallest normal, 2^-14
    const float scaled = std::bit_cast<float>(a) + 0.5f;               // 0.5 aligns the ulp to 2^-24
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(scaled) - 0x3F000000u));
  }
  const uint32_t rounded = a + 0xFFFu + ((a >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

inline float round_f16(float x) { return decode_f16(encode_f16(x)); }

// 2^(b-127); b = 255 is NaN, b = 0 is 2^-127 (a subnormal float).
inline float decode_e8m0(uint8_t b) {
  if (b == 255u) return std::bit_cast<float>(0x7FC00000u);
  if (b == 0u) return 0x1.0p-127f;
  return std::bit_cast<float>(static_cast<uint32_t>(b) << 23);
}

float decode_e4m3(uint8_t b);       // 0x7F and 0xFF are NaN
uint8_t encode_e4m3(float x);       // nearest even, saturating at +-448; NaN -> 0x7F
float decode_e2m1(uint8_t nibble);  // low four bits; code 8 (-0) decodes to 0
uint8_t encode_e2m1(float x);       // nearest, ties to even code, saturating at +-6

// e4m3(x) as a float.
inline float round_e4m3(float x) { return decode_e4m3(encode_e4m3(x)); }

}  // namespace espalier
