// The loops for AVX2 and FMA.
#include <immintrin.h>

#include "ops/cpu/kernels.h"
#include "ops/scalar_math.h"  // static functions only

namespace espalier::ops {
namespace {

constexpr int kMicroRows = 6;
constexpr int kMicroColumns = 1;
constexpr int kMicroColumns4 = 1;
constexpr int kMicroColumns2 = 2;
constexpr int kMicroColumns1 = 4;

struct F16 {
  __m256 lo, hi;
};
inline F16 f16_zero() {
  return {_mm256_setzero_ps(), _mm256_setzero_ps()};
}
inline F16 f16_set(float x) {
  return {_mm256_set1_ps(x), _mm256_set1_ps(x)};
}
inline F16 f16_load(const float* p) {
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
inline void f16_store(float* p, const F16& a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline F16 f16_fma(const F16& a, const F16& b, const F16& c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline float f16_sum(const F16& a) {
  const __m256 s8 = _mm256_add_ps(a.lo, a.hi);
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_shuffle_ps(s2, s2, 1)));
}

#include "ops/cpu/kernels_inl.h"

}  // namespace

const Kernels* avx2_kernels() {
  return &kTable;
}

}  // namespace espalier::ops
