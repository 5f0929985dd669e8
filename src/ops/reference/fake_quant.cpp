#include "ops/fake_quant.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "tensor/float_formats.h"

namespace espalier::ops::reference {
namespace {

// 2^ceil(log2(x)) from the float's bits, for x > 0.
float power_of_two_at_least(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t exponent = ((u >> 23) & 0xFFu) + ((u & 0x7FFFFFu) != 0 ? 1u : 0u);
  return std::bit_cast<float>(exponent << 23);
}

float largest(const float* x, int64_t n) {
  float a = 0;
  for (int64_t i = 0; i < n; ++i) a = std::max(a, std::fabs(x[i]));
  return a;
}

void quantise_group(float* x, int64_t n, FakeQuantFormat format) {
  const float a = largest(x, n);
  switch (format) {
    case FakeQuantFormat::kAct: {
      const float s = power_of_two_at_least(std::max(a, 1e-4f) * (1.0f / 448.0f));
      for (int64_t i = 0; i < n; ++i) x[i] = round_e4m3(std::clamp(x[i] / s, -448.0f, 448.0f)) * s;
      return;
    }
    case FakeQuantFormat::kFp4: {
      const float s = power_of_two_at_least(std::max(a, 6.0f * 0x1.0p-126f) * (1.0f / 6.0f));
      for (int64_t i = 0; i < n; ++i) x[i] = decode_e2m1(encode_e2m1(std::clamp(x[i] / s, -6.0f, 6.0f))) * s;
      return;
    }
    case FakeQuantFormat::kKv4: {
      const float s = round_e4m3(std::max(a, 6.0f * 0x1.0p-9f) / 6.0f);
      for (int64_t i = 0; i < n; ++i) x[i] = decode_e2m1(encode_e2m1(std::clamp(x[i] / s, -6.0f, 6.0f))) * s;
      return;
    }
  }
}

}  // namespace

void fake_quant(const FakeQuantParams& p) {
  const int64_t group = fake_quant_group(p.format);
  for (int64_t t = 0; t < p.n_rows; ++t) {
    for (int64_t i = 0; i < p.d; i += group) quantise_group(p.x + t * p.d + i, std::min(group, p.d - i), p.format);
  }
}

}  // namespace espalier::ops::reference
