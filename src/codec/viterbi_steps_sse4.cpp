#include "codec/viterbi_steps_impl.h"

#if defined(__SSE4_1__)
#include <smmintrin.h>

namespace espalier::codec {
namespace {

struct U16x8 {
  using T = uint16_t;
  using C = int16_t;
  using V = __m128i;
  static constexpr int kLanes = 8;
  static V load(const T* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  static void store(T* p, V v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), v); }
  static V load_code(const C* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  static V broadcast(T x) { return _mm_set1_epi16(static_cast<short>(x)); }
  static V splat_code(C x) { return _mm_set1_epi16(x); }
  static V add(V a, V b) { return _mm_adds_epu16(a, b); }
  static V subtract(V a, V b) { return _mm_sub_epi16(a, b); }
  static V min(V a, V b) { return _mm_min_epu16(a, b); }
  template <CostRule kRule>
  static V error(V code, V w) {
    V d = _mm_sub_epi16(code, w);
    if constexpr (kRule == CostRule::kClipped) {
      d = _mm_min_epu16(_mm_abs_epi16(d), _mm_set1_epi16(255));
      return _mm_mullo_epi16(d, d);
    }
    if constexpr (kRule == CostRule::kDoubled) d = _mm_adds_epi16(d, d);
    return _mm_mulhrs_epi16(d, d);
  }
  static void interleave(V a, V b, V& lo, V& hi) {
    lo = _mm_unpacklo_epi16(a, b);
    hi = _mm_unpackhi_epi16(a, b);
  }
};

struct F32x4 {
  using T = float;
  using C = float;
  using V = __m128;
  static constexpr int kLanes = 4;
  static V load(const T* p) { return _mm_loadu_ps(p); }
  static void store(T* p, V v) { _mm_storeu_ps(p, v); }
  static V load_code(const C* p) { return _mm_loadu_ps(p); }
  static V broadcast(T x) { return _mm_set1_ps(x); }
  static V splat_code(C x) { return _mm_set1_ps(x); }
  static V add(V a, V b) { return _mm_add_ps(a, b); }
  static V min(V a, V b) { return _mm_min_ps(a, b); }
  template <CostRule kRule>
  static V error(V code, V w) {
    const V d = _mm_sub_ps(code, w);
    return _mm_mul_ps(d, d);
  }
  static void interleave(V a, V b, V& lo, V& hi) {
    lo = _mm_unpacklo_ps(a, b);
    hi = _mm_unpackhi_ps(a, b);
  }
};

}  // namespace

const StepKernels& step_kernels_sse4() {
  static const StepKernels kernels = make_step_kernels<U16x8, F32x4>();
  return kernels;
}

}  // namespace espalier::codec
#endif
