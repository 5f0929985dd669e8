// The loops for any CPU. On x86 before FMA the fused multiply-add is emulated exactly: the product of two floats is
// exact in double, the sum is rounded to odd in double, and rounding that to float is then the correctly rounded result
// (Boldo and Melquiond 2008). Elsewhere the compiler's fused multiply-add is used.
#if defined(__SSE4_2__)
#include <nmmintrin.h>
#endif

#include "ops/cpu/kernels.h"
#include "ops/scalar_math.h"

namespace espalier::ops {
namespace {

constexpr int kMicroRows = 4;
constexpr int kMicroColumns = 1;
constexpr int kMicroColumns4 = 1;
constexpr int kMicroColumns2 = 1;
constexpr int kMicroColumns1 = 1;

typedef float F4 __attribute__((vector_size(16)));
typedef float F4Unaligned __attribute__((vector_size(16), aligned(4), may_alias));

struct F16 {
  F4 v[4];
};
inline F16 f16_zero() {
  return {};
}
inline F16 f16_set(float x) {
  const F4 v = {x, x, x, x};
  return {{v, v, v, v}};
}
inline F16 f16_load(const float* p) {
  F16 r;
  for (int i = 0; i < 4; ++i) r.v[i] = *(const F4Unaligned*)(p + 4 * i);
  return r;
}
inline void f16_store(float* p, const F16& a) {
  for (int i = 0; i < 4; ++i) *(F4Unaligned*)(p + 4 * i) = a.v[i];
}
#if defined(__SSE4_2__)
inline __m128d sum_to_odd(__m128d product, __m128d addend) {
  const __m128d sum = _mm_add_pd(product, addend);
  const __m128d back = _mm_sub_pd(sum, product);
  // sum + error is exact.
  const __m128d error = _mm_add_pd(_mm_sub_pd(product, _mm_sub_pd(sum, back)), _mm_sub_pd(addend, back));
  const __m128d zero = _mm_setzero_pd();
  const __m128i bits = _mm_castpd_si128(sum);
  // An even last bit of an inexact sum moves one step towards the error. NaN (from infinities) compares false.
  const __m128i is_inexact = _mm_castpd_si128(_mm_or_pd(_mm_cmpgt_pd(error, zero), _mm_cmplt_pd(error, zero)));
  const __m128i is_even = _mm_sub_epi64(_mm_and_si128(bits, _mm_set1_epi64x(1)), _mm_set1_epi64x(1));
  const __m128i differs = _mm_cmpgt_epi64(_mm_setzero_si128(), _mm_xor_si128(bits, _mm_castpd_si128(error)));
  const __m128i step = _mm_or_si128(differs, _mm_set1_epi64x(1));  // -1 when the signs differ, else +1
  return _mm_castsi128_pd(_mm_add_epi64(bits, _mm_and_si128(step, _mm_and_si128(is_even, is_inexact))));
}
inline F4 fma4(F4 a, F4 b, F4 c) {
  const __m128 low = _mm_cvtpd_ps(sum_to_odd(_mm_mul_pd(_mm_cvtps_pd(a), _mm_cvtps_pd(b)), _mm_cvtps_pd(c)));
  const __m128 ah = _mm_movehl_ps(a, a), bh = _mm_movehl_ps(b, b), ch = _mm_movehl_ps(c, c);
  const __m128 high = _mm_cvtpd_ps(sum_to_odd(_mm_mul_pd(_mm_cvtps_pd(ah), _mm_cvtps_pd(bh)), _mm_cvtps_pd(ch)));
  return _mm_movelh_ps(low, high);
}
#else
inline F4 fma4(F4 a, F4 b, F4 c) {
  F4 r;
  for (int i = 0; i < 4; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
}
#endif
inline F16 f16_fma(const F16& a, const F16& b, const F16& c) {
  F16 r;
  for (int i = 0; i < 4; ++i) r.v[i] = fma4(a.v[i], b.v[i], c.v[i]);
  return r;
}
inline float f16_sum(const F16& a) {
  const F4 s8[2] = {a.v[0] + a.v[2], a.v[1] + a.v[3]};
  const F4 s4 = s8[0] + s8[1];
  return (s4[0] + s4[2]) + (s4[1] + s4[3]);
}

#include "ops/cpu/kernels_inl.h"

}  // namespace

const Kernels* baseline_kernels() {
  return &kTable;
}

}  // namespace espalier::ops
