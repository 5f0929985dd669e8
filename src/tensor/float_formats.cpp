#include "tensor/float_formats.h"

#include <array>
#include <cmath>

namespace espalier {
namespace {

std::array<float, 256> make_e4m3_table() {
  std::array<float, 256> t{};
  for (int b = 0; b < 256; ++b) {
    const int exponent = (b >> 3) & 15;
    const int mantissa = b & 7;
    float v;
    if ((b & 0x7F) == 0x7F) {
      v = std::bit_cast<float>(0x7FC00000u);
    } else if (exponent == 0) {
      v = std::ldexp(static_cast<float>(mantissa), -9);
    } else {
      v = std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
    }
    t[static_cast<size_t>(b)] = (b & 0x80) != 0 ? -v : v;
  }
  return t;
}

const std::array<float, 256> kE4m3 = make_e4m3_table();
constexpr std::array<float, 8> kE2m1 = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

}  // namespace

float decode_e4m3(uint8_t b) { return kE4m3[b]; }

uint8_t encode_e4m3(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint8_t sign = static_cast<uint8_t>((u >> 24) & 0x80u);
  const uint32_t a = u & 0x7FFFFFFFu;
  if (a > 0x7F800000u) return 0x7F;
  if (a >= 0x43E80000u) return static_cast<uint8_t>(sign | 0x7E);  // 464 and above: saturate at 448
  if (a < 0x3C800000u) {                                           // below 2^-6: multiples of 2^-9
    const float scaled = std::bit_cast<float>(a) + 16384.0f;       // ulp of [16384, 32768) is 2^-9
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(scaled) - std::bit_cast<uint32_t>(16384.0f)));
  }
  const uint32_t rounded = a + 0x7FFFFu + ((a >> 20) & 1u);
  const uint32_t code = (rounded >> 20) - (120u << 3);
  return static_cast<uint8_t>(sign | (code > 0x7Eu ? 0x7Eu : code));
}

float decode_e2m1(uint8_t nibble) {
  const float v = kE2m1[nibble & 7u];
  return (nibble & 8u) != 0 && v != 0.0f ? -v : v;
}

uint8_t encode_e2m1(float x) {
  const float a = std::fabs(x);
  // Upper bounds of each code's interval; a tie goes to the even code.
  uint8_t code = 7;
  if (a <= 0.25f) code = 0;
  else if (a < 0.75f) code = 1;
  else if (a <= 1.25f) code = 2;
  else if (a < 1.75f) code = 3;
  else if (a <= 2.5f) code = 4;
  else if (a < 3.5f) code = 5;
  else if (a <= 5.0f) code = 6;
  return static_cast<uint8_t>(code | (std::signbit(x) && code != 0 ? 8u : 0u));
}

}  // namespace espalier
