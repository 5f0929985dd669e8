#include <immintrin.h>

#include "codec/viterbi_steps_impl.h"

namespace espalier::codec {
namespace {

struct U16x16 {
  using T = uint16_t;
  using C = int16_t;
  using V = __m256i;
  static constexpr int kLanes = 16;
  static V load(const T* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static void store(T* p, V v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
  static V load_code(const C* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static V broadcast(T x) { return _mm256_set1_epi16(static_cast<short>(x)); }
  static V splat_code(C x) { return _mm256_set1_epi16(x); }
  static V add(V a, V b) { return _mm256_adds_epu16(a, b); }
  static V subtract(V a, V b) { return _mm256_sub_epi16(a, b); }
  static V min(V a, V b) { return _mm256_min_epu16(a, b); }
  template <CostRule kRule>
  static V error(V code, V w) {
    V d = _mm256_sub_epi16(code, w);
    if constexpr (kRule == CostRule::kClipped) {
      d = _mm256_min_epu16(_mm256_abs_epi16(d), _mm256_set1_epi16(255));
      return _mm256_mullo_epi16(d, d);
    }
    if constexpr (kRule == CostRule::kDoubled) d = _mm256_adds_epi16(d, d);
    return _mm256_mulhrs_epi16(d, d);
  }
  static void interleave(V a, V b, V& lo, V& hi) {
    const V even = _mm256_unpacklo_epi16(a, b);
    const V odd = _mm256_unpackhi_epi16(a, b);
    lo = _mm256_permute2x128_si256(even, odd, 0x20);
    hi = _mm256_permute2x128_si256(even, odd, 0x31);
  }
};

struct F32x8 {
  using T = float;
  using C = float;
  using V = __m256;
  static constexpr int kLanes = 8;
  static V load(const T* p) { return _mm256_loadu_ps(p); }
  static void store(T* p, V v) { _mm256_storeu_ps(p, v); }
  static V load_code(const C* p) { return _mm256_loadu_ps(p); }
  static V broadcast(T x) { return _mm256_set1_ps(x); }
  static V splat_code(C x) { return _mm256_set1_ps(x); }
  static V add(V a, V b) { return _mm256_add_ps(a, b); }
  static V min(V a, V b) { return _mm256_min_ps(a, b); }
  template <CostRule kRule>
  static V error(V code, V w) {
    const V d = _mm256_sub_ps(code, w);
    return _mm256_mul_ps(d, d);
  }
  static void interleave(V a, V b, V& lo, V& hi) {
    const V even = _mm256_unpacklo_ps(a, b);
    const V odd = _mm256_unpackhi_ps(a, b);
    lo = _mm256_permute2f128_ps(even, odd, 0x20);
    hi = _mm256_permute2f128_ps(even, odd, 0x31);
  }
};

}  // namespace

const StepKernels& step_kernels_avx2() {
  static const StepKernels kernels = make_step_kernels<U16x16, F32x8>();
  return kernels;
}

}  // namespace espalier::codec
