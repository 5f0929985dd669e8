// exp, log and friends whose bits do not depend on the machine's libm: double arithmetic in a fixed order (no
// contraction, no tables), accurate to about 1e-15 relative, so that a float result is correctly rounded in all but a
// few cases in 1e8. sqrt and division are IEEE and are used directly. Everything here has internal linkage on purpose:
// the header is also included by files that are compiled for newer instruction sets, whose code must not be linked into
// others. Device code uses the same functions and gets the same bits. Threads: pure.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define ESPALIER_ON_HOST_AND_DEVICE __host__ __device__
#else
#define ESPALIER_ON_HOST_AND_DEVICE
#endif

namespace espalier::ops {

// 1/13! … 1/0!: the Taylor series of e^r for |r| <= ln(2)/2, highest power first.
static constexpr int kExpTerms = 14;
#define ESPALIER_EXP_COEFFICIENTS \
  {1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0, 1.0 / 5040.0, \
   1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0}
static constexpr double kExpCoefficients[kExpTerms] = ESPALIER_EXP_COEFFICIENTS;

// e^x. Arguments below -708 give e^-708 (zero as a float), above 709 give e^709 (infinity as a float); NaN stays NaN.
ESPALIER_ON_HOST_AND_DEVICE static inline double exp_d(double x) {
  x = x < -708.0 ? -708.0 : x;
  x = x > 709.0 ? 709.0 : x;
  const double shifted = x * 1.4426950408889634074 + 0x1.8p52;  // rounds to the nearest integer in the low bits
  const double k = shifted - 0x1.8p52;
  double r = x - k * 0x1.62e42feep-1;  // ln 2 in two parts; the first product is exact
  r = r - k * 0x1.a39ef35793c76p-33;
#ifdef __CUDA_ARCH__
  const double coefficients[kExpTerms] = ESPALIER_EXP_COEFFICIENTS;  // device code cannot index a host array
#else
  const double* coefficients = kExpCoefficients;
#endif
  double p = coefficients[0];
  for (int i = 1; i < kExpTerms; ++i) p = p * r + coefficients[i];
  const uint64_t k_bits = __builtin_bit_cast(uint64_t, shifted) - __builtin_bit_cast(uint64_t, 0x1.8p52);
  return p * __builtin_bit_cast(double, (k_bits + 1023u) << 52);
}

// ln x for positive finite normal doubles.
ESPALIER_ON_HOST_AND_DEVICE static inline double log_d(double x) {
  uint64_t u = __builtin_bit_cast(uint64_t, x);
  int64_t e = static_cast<int64_t>(u >> 52) - 1023;
  double m = __builtin_bit_cast(double, (u & 0x000FFFFFFFFFFFFFull) | 0x3FF0000000000000ull);
  if (m > 1.4142135623730951) {
    m = m * 0.5;
    e = e + 1;
  }
  const double f = (m - 1.0) / (m + 1.0);
  const double s = f * f;
  double p = 1.0 / 25.0;
  for (int n = 23; n >= 3; n -= 2) p = p * s + 1.0 / static_cast<double>(n);
  const double ed = static_cast<double>(e);
  return ed * 0x1.62e42feep-1 + (2.0 * f + (2.0 * f * s * p + ed * 0x1.a39ef35793c76p-33));
}

// ln(1 + y) for y >= 0, accurate for small y.
ESPALIER_ON_HOST_AND_DEVICE static inline double log1p_d(double y) {
  if (y < 0.4) {
    const double f = y / (2.0 + y);
    const double s = f * f;
    double p = 1.0 / 25.0;
    for (int n = 23; n >= 3; n -= 2) p = p * s + 1.0 / static_cast<double>(n);
    return 2.0 * f + 2.0 * f * s * p;
  }
  return log_d(1.0 + y);
}

ESPALIER_ON_HOST_AND_DEVICE static inline double sigmoid_d(double x) {
  return 1.0 / (1.0 + exp_d(-x));
}
// log(1 + e^x), linear above 20 as in torch.
ESPALIER_ON_HOST_AND_DEVICE static inline double softplus_d(double x) {
  return x > 20.0 ? x : log1p_d(exp_d(x));
}
// base^exponent for base > 0.
ESPALIER_ON_HOST_AND_DEVICE static inline double pow_d(double base, double exponent) {
  return exp_d(exponent * log_d(base));
}

// sin and cos of an angle with |x| <= 2^21 (positions times frequencies stay below).
ESPALIER_ON_HOST_AND_DEVICE static inline void sincos_d(double x, double* sine, double* cosine) {
  const double shifted = x * 0.63661977236758134308 + 0x1.8p52;
  const double k = shifted - 0x1.8p52;
  double r = x - k * 0x1.921fb544p+0;  // pi/2 in three parts of at most 31 bits: the products are exact
  r = r - k * 0x1.0b4611a6p-34;
  r = r - k * 0x1.3198a2e037073p-69;
  const double s2 = r * r;
  double ps = -1.0 / 1307674368000.0;
  ps = ps * s2 + 1.0 / 6227020800.0;
  ps = ps * s2 - 1.0 / 39916800.0;
  ps = ps * s2 + 1.0 / 362880.0;
  ps = ps * s2 - 1.0 / 5040.0;
  ps = ps * s2 + 1.0 / 120.0;
  ps = ps * s2 - 1.0 / 6.0;
  const double sin_r = r + r * (s2 * ps);
  double pc = 1.0 / 20922789888000.0;
  pc = pc * s2 - 1.0 / 87178291200.0;
  pc = pc * s2 + 1.0 / 479001600.0;
  pc = pc * s2 - 1.0 / 3628800.0;
  pc = pc * s2 + 1.0 / 40320.0;
  pc = pc * s2 - 1.0 / 720.0;
  pc = pc * s2 + 1.0 / 24.0;
  pc = pc * s2 - 0.5;
  const double cos_r = 1.0 + s2 * pc;
  const uint64_t quadrant = (__builtin_bit_cast(uint64_t, shifted) - __builtin_bit_cast(uint64_t, 0x1.8p52)) & 3u;
  const double s = (quadrant & 1u) != 0 ? cos_r : sin_r;
  const double c = (quadrant & 1u) != 0 ? sin_r : cos_r;
  *sine = (quadrant & 2u) != 0 ? -s : s;
  *cosine = quadrant == 1u || quadrant == 2u ? -c : c;
}

}  // namespace espalier::ops
