// Oracles: the definitions of the formats, evaluated in double for every code and for midpoints between neighbouring codes.
#include "tensor/float_formats.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace espalier {
namespace {

double e4m3_value(int code) {
  const int e = (code >> 3) & 15, m = code & 7;
  const double v = e == 0 ? std::ldexp(m, -9) : std::ldexp(8 + m, e - 10);
  return (code & 0x80) ? -v : v;
}

double f16_value(int code) {
  const int e = (code >> 10) & 31, m = code & 1023;
  const double v = e == 0 ? std::ldexp(m, -24) : std::ldexp(1024 + m, e - 25);
  return (code & 0x8000) ? -v : v;
}

// For ascending finite codes c, c+1: the value between them rounds to the nearer, ties to the even code.
template <typename Encode, typename Value>
void expect_nearest_even(int first, int last, Encode encode, Value value) {
  for (int c = first; c < last; ++c) {
    const double a = value(c), b = value(c + 1), mid = (a + b) / 2;
    const auto even = (c % 2 == 0) ? c : c + 1;
    EXPECT_EQ(encode(static_cast<float>(a)), c);
    EXPECT_EQ(encode(static_cast<float>(mid)), even) << mid;
    EXPECT_EQ(encode(std::nextafter(static_cast<float>(mid), 0.0f)), c) << mid;
    EXPECT_EQ(encode(std::nextafter(static_cast<float>(mid), 1e9f)), c + 1) << mid;
  }
}

TEST(E4m3, decodes_every_code) {
  for (int c = 0; c < 256; ++c) {
    if ((c & 0x7F) == 0x7F) EXPECT_TRUE(std::isnan(decode_e4m3(static_cast<uint8_t>(c))));
    else EXPECT_EQ(decode_e4m3(static_cast<uint8_t>(c)), e4m3_value(c)) << c;
  }
}

TEST(E4m3, encodes_to_nearest_even_and_saturates) {
  expect_nearest_even(0, 0x7E, encode_e4m3, e4m3_value);
  for (int c = 0x80; c < 0xFE; ++c) EXPECT_EQ(encode_e4m3(static_cast<float>(e4m3_value(c))), c);
  EXPECT_EQ(encode_e4m3(449.0f), 0x7E);
  EXPECT_EQ(encode_e4m3(-1e30f), 0xFE);
  EXPECT_EQ(encode_e4m3(std::numeric_limits<float>::infinity()), 0x7E);
  EXPECT_EQ(encode_e4m3(std::nanf("")), 0x7F);
}

TEST(F16, round_trips_every_finite_code_and_rounds_to_nearest_even) {
  for (int c = 0; c < 65536; ++c) {
    if (((c >> 10) & 31) == 31) continue;
    const auto h = static_cast<uint16_t>(c);
    EXPECT_EQ(decode_f16(h), static_cast<float>(f16_value(c)));
    EXPECT_EQ(encode_f16(decode_f16(h)), h);
  }
  expect_nearest_even(0, 0x7BFF, encode_f16, f16_value);
  EXPECT_EQ(encode_f16(65520.0f), 0x7C00);
  EXPECT_EQ(encode_f16(65519.99f), 0x7BFF);
  EXPECT_TRUE(std::isnan(decode_f16(encode_f16(std::nanf("")))));
}

TEST(Bf16, rounds_to_nearest_even_and_keeps_nan) {
  EXPECT_EQ(encode_bf16(1.0f), 0x3F80);
  EXPECT_EQ(encode_bf16(1.00390625f), 0x3F80);           // exactly between 1 and 1 + 2^-7: even
  EXPECT_EQ(encode_bf16(1.01171875f), 0x3F82);           // between 1 + 2^-7 and 1 + 2^-6: even
  EXPECT_EQ(encode_bf16(std::nextafter(1.00390625f, 2.0f)), 0x3F81);
  EXPECT_TRUE(std::isnan(decode_bf16(encode_bf16(std::nanf("")))));
}

TEST(E8m0, is_a_power_of_two_or_nan) {
  EXPECT_EQ(decode_e8m0(127), 1.0f);
  EXPECT_EQ(decode_e8m0(0), std::ldexp(1.0f, -127));
  EXPECT_EQ(decode_e8m0(254), std::ldexp(1.0f, 127));
  EXPECT_TRUE(std::isnan(decode_e8m0(255)));
}

TEST(E2m1, has_sixteen_codes_and_ties_go_to_the_even_one) {
  const std::vector<float> values = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  for (int c = 0; c < 8; ++c) {
    EXPECT_EQ(decode_e2m1(static_cast<uint8_t>(c)), values[static_cast<size_t>(c)]);
    EXPECT_EQ(decode_e2m1(static_cast<uint8_t>(c | 8)), c == 0 ? 0.0f : -values[static_cast<size_t>(c)]);
    EXPECT_EQ(encode_e2m1(values[static_cast<size_t>(c)]), c);
  }
  for (int c = 0; c < 7; ++c) {
    const float mid = (values[static_cast<size_t>(c)] + values[static_cast<size_t>(c) + 1]) / 2;
    EXPECT_EQ(encode_e2m1(mid), c % 2 == 0 ? c : c + 1);
    EXPECT_EQ(encode_e2m1(-mid) & 7, c % 2 == 0 ? c : c + 1);
    EXPECT_EQ(encode_e2m1(std::nextafter(mid, 0.0f)), c);
    EXPECT_EQ(encode_e2m1(std::nextafter(mid, 9.0f)), c + 1);
  }
  EXPECT_EQ(encode_e2m1(100.0f), 7);
}

}  // namespace
}  // namespace espalier
