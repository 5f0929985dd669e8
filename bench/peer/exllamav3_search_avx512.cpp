// Compiled for AVX-512 without FP16 arithmetic: fp16 costs through fp32, with the results of one rounding each.
#include "bench/peer/exllamav3_steps.h"

#if defined(__AVX512BW__)
// GCC 12's own headers read a deliberately undefined operand of unmasked operations.
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>

namespace espalier::peer {
namespace {

// 32 values in fp32.
struct Lanes {
  __m512 low, high;
};
using Costs = Lanes;

inline Lanes widen(__m512i bits) {
  return {_mm512_cvtph_ps(_mm512_castsi512_si256(bits)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1))};
}
inline Costs load_costs(const uint16_t* p) {
  return widen(_mm512_loadu_si512(p));
}
inline Costs broadcast_cost(uint16_t x) {
  const __m512 wide = _mm512_cvtph_ps(_mm256_set1_epi16(static_cast<short>(x)));
  return {wide, wide};
}

constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

// Sums rounded to odd in fp32: rounding them to fp16 then gives one rounding, and keeps their order, so the least is
// chosen first.
struct Sums {
  __m512i low, high;
};
inline Sums least(const Sums& a, const Sums& b) {
  return {_mm512_min_epu32(a.low, b.low), _mm512_min_epu32(a.high, b.high)};
}
inline __m512i finish(const Sums& sums) {
  const __m256i low = _mm512_cvtps_ph(_mm512_castsi512_ps(sums.low), kNearest);
  const __m256i high = _mm512_cvtps_ph(_mm512_castsi512_ps(sums.high), kNearest);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

class Target {
 public:
  explicit Target(uint16_t w) : w_(_mm512_cvtph_ps(_mm256_set1_epi16(static_cast<short>(w)))) {}

  Sums cost(const Costs& prev, const uint16_t* table) const {
    const Lanes code = load_costs(table);
    return {sum(prev.low, code.low), sum(prev.high, code.high)};
  }

 private:
  // The difference of two fp16 numbers, rounded to fp32 and then to fp16, is rounded as if once (24 >= 2 * 11 + 2
  // bits). Its square is exact in fp32. The sum of that and an fp16 number is not: of the sums rounded down and up at
  // most one is odd when they differ.
  __m512i sum(__m512 prev, __m512 code) const {
    const __m512 d = _mm512_cvtph_ps(_mm512_cvtps_ph(_mm512_sub_ps(code, w_), kNearest));
    const __m512 square = _mm512_mul_ps(d, d);
    const __m512i down = _mm512_castps_si512(_mm512_add_round_ps(prev, square, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC));
    const __m512i up =
        _mm512_castps_si512(_mm512_add_round_ps(prev, square, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC));
    return _mm512_ternarylogic_epi32(down, up, _mm512_set1_epi32(1), 0xF8);  // down | (up & 1)
  }

  __m512 w_;
};

#include "bench/peer/exllamav3_steps_lanes.h"

}  // namespace

Step<uint16_t> avx512_step(int a, int b) {
  return step_of(a, b);
}

bool has_avx512_instructions() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

}  // namespace espalier::peer

#else

namespace espalier::peer {

Step<uint16_t> avx512_step(int, int) {
  return nullptr;
}
bool has_avx512_instructions() {
  return false;
}

}  // namespace espalier::peer

#endif
