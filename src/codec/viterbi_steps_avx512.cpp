// GCC 12's own AVX-512 header reads a deliberately undefined operand of an unmasked operation.
#pragma GCC diagnostic ignored "-Wuninitialized"

#include <immintrin.h>

#include "codec/viterbi_steps_impl.h"

namespace espalier::codec {
namespace {

struct U16x32 {
  using T = uint16_t;
  using C = int16_t;
  using V = __m512i;
  static constexpr int kLanes = 32;
  static V load(const T* p) { return _mm512_loadu_si512(p); }
  static void store(T* p, V v) { _mm512_storeu_si512(p, v); }
  static V load_code(const C* p) { return _mm512_loadu_si512(p); }
  static V broadcast(T x) { return _mm512_set1_epi16(static_cast<short>(x)); }
  static V splat_code(C x) { return _mm512_set1_epi16(x); }
  static V add(V a, V b) { return _mm512_adds_epu16(a, b); }
  static V subtract(V a, V b) { return _mm512_sub_epi16(a, b); }
  static V min(V a, V b) { return _mm512_min_epu16(a, b); }
  template <CostRule kRule>
  static V error(V code, V w) {
    V d = _mm512_sub_epi16(code, w);
    if constexpr (kRule == CostRule::kClipped) {
      d = _mm512_min_epu16(_mm512_abs_epi16(d), _mm512_set1_epi16(255));
      return _mm512_mullo_epi16(d, d);
    }
    if constexpr (kRule == CostRule::kDoubled) d = _mm512_adds_epi16(d, d);
    return _mm512_mulhrs_epi16(d, d);
  }
  static void interleave(V a, V b, V& lo, V& hi) {
    alignas(64) static constexpr uint16_t kLo[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const V lo_index = _mm512_load_si512(kLo);
    const V hi_index = _mm512_add_epi16(lo_index, _mm512_set1_epi16(16));
    lo = _mm512_permutex2var_epi16(a, lo_index, b);
    hi = _mm512_permutex2var_epi16(a, hi_index, b);
  }
};

struct F32x16 {
  using T = float;
  using C = float;
  using V = __m512;
  static constexpr int kLanes = 16;
  static V load(const T* p) { return _mm512_loadu_ps(p); }
  static void store(T* p, V v) { _mm512_storeu_ps(p, v); }
  static V load_code(const C* p) { return _mm512_loadu_ps(p); }
  static V broadcast(T x) { return _mm512_set1_ps(x); }
  static V splat_code(C x) { return _mm512_set1_ps(x); }
  static V add(V a, V b) { return _mm512_add_ps(a, b); }
  static V min(V a, V b) { return _mm512_min_ps(a, b); }
  template <CostRule kRule>
  static V error(V code, V w) {
    const V d = _mm512_sub_ps(code, w);
    return _mm512_mul_ps(d, d);
  }
  static void interleave(V a, V b, V& lo, V& hi) {
    const __m512i lo_index = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i hi_index = _mm512_add_epi32(lo_index, _mm512_set1_epi32(8));
    lo = _mm512_permutex2var_ps(a, lo_index, b);
    hi = _mm512_permutex2var_ps(a, hi_index, b);
  }
};

}  // namespace

const StepKernels& step_kernels_avx512() {
  static const StepKernels kernels = make_step_kernels<U16x32, F32x16>();
  return kernels;
}

}  // namespace espalier::codec
