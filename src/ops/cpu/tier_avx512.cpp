// The loops for AVX-512 (F, BW, VL, DQ).
#include <immintrin.h>

#include "ops/cpu/kernels.h"
#include "ops/scalar_math.h"  // static functions only

namespace espalier::ops {
namespace {

constexpr int kMicroRows = 12;
constexpr int kMicroColumns = 2;
constexpr int kMicroColumns4 = 4;
constexpr int kMicroColumns2 = 8;
constexpr int kMicroColumns1 = 8;

struct F16 {
  __m512 v;
};
inline F16 f16_zero() {
  return {_mm512_setzero_ps()};
}
inline F16 f16_set(float x) {
  return {_mm512_set1_ps(x)};
}
inline F16 f16_load(const float* p) {
  return {_mm512_loadu_ps(p)};
}
inline void f16_store(float* p, const F16& a) {
  _mm512_storeu_ps(p, a.v);
}
inline F16 f16_fma(const F16& a, const F16& b, const F16& c) {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
inline float f16_sum(const F16& a) {
  const __m256 s8 = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_shuffle_ps(s2, s2, 1)));
}

#include "ops/cpu/kernels_inl.h"

}  // namespace

const Kernels* avx512_kernels() {
  return &kTable;
}

}  // namespace espalier::ops
