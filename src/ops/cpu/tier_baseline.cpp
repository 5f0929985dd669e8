// The loops for any CPU. The fused multiply-add is emulated exactly: the product of two floats is exact in double, the
// sum is rounded to odd in double, and rounding that to float is then the correctly rounded result (Boldo and Melquiond
// 2008).
#include "ops/cpu/kernels.h"
#include "ops/scalar_math.h"

namespace espalier::ops {
namespace {

constexpr int kMicroRows = 4;
constexpr int kMicroColumns = 1;
constexpr int kMicroColumns4 = 1;
constexpr int kMicroColumns2 = 1;
constexpr int kMicroColumns1 = 1;

struct F16 {
  float v[16];
};
inline F16 f16_zero() {
  return {};
}
inline F16 f16_set(float x) {
  F16 r;
  for (float& v : r.v) v = x;
  return r;
}
inline F16 f16_load(const float* p) {
  F16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = p[i];
  return r;
}
inline void f16_store(float* p, const F16& a) {
  for (int i = 0; i < 16; ++i) p[i] = a.v[i];
}
inline float exact_fma(float a, float b, float c) {
  const double product = static_cast<double>(a) * static_cast<double>(b);
  const double addend = static_cast<double>(c);
  const double sum = product + addend;
  const double back = sum - product;
  const double error = (product - (sum - back)) + (addend - back);
  uint64_t u = __builtin_bit_cast(uint64_t, sum);
  const bool is_inexact = error > 0.0 || error < 0.0;  // false for NaN, which infinities make
  const uint64_t toward = (error > 0.0) == (sum > 0.0) ? 1u : ~uint64_t{0};
  u += is_inexact && (u & 1u) == 0 ? toward : 0u;
  return static_cast<float>(__builtin_bit_cast(double, u));
}
inline F16 f16_fma(const F16& a, const F16& b, const F16& c) {
  F16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = exact_fma(a.v[i], b.v[i], c.v[i]);
  return r;
}
inline float f16_sum(const F16& a) {
  float s[16];
  for (int i = 0; i < 16; ++i) s[i] = a.v[i];
  for (int w = 8; w >= 1; w /= 2)
    for (int i = 0; i < w; ++i) s[i] = s[i] + s[i + w];
  return s[0];
}

#include "ops/cpu/kernels_inl.h"

}  // namespace

const Kernels* baseline_kernels() {
  return &kTable;
}

}  // namespace espalier::ops
