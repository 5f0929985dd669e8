// Compiled for AVX512-FP16 where the compiler knows it; everything but the two entry points is internal.
#include "bench/peer/exllamav3_steps.h"

#if defined(__AVX512FP16__)
// GCC 12's own headers read a deliberately undefined operand of unmasked operations.
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <cpuid.h>
#include <immintrin.h>

namespace espalier::peer {
namespace {

using Costs = __m512h;

inline Costs load_costs(const uint16_t* p) {
  return _mm512_castsi512_ph(_mm512_loadu_si512(p));
}
inline Costs broadcast_cost(uint16_t x) {
  return _mm512_castsi512_ph(_mm512_set1_epi16(static_cast<short>(x)));
}

using Sums = __m512i;  // fp16 bits; never negative, so they compare as integers
inline Sums least(Sums a, Sums b) {
  return _mm512_min_epu16(a, b);
}
inline __m512i finish(Sums sums) {
  return sums;
}

class Target {
 public:
  explicit Target(uint16_t w) : w_(broadcast_cost(w)) {}
  Sums cost(Costs prev, const uint16_t* table) const {
    const __m512h d = _mm512_sub_ph(load_costs(table), w_);
    return _mm512_castph_si512(_mm512_fmadd_ph(d, d, prev));
  }

 private:
  __m512h w_;
};

#include "bench/peer/exllamav3_steps_lanes.h"

}  // namespace

Step<uint16_t> fp16_step(int a, int b) {
  return step_of(a, b);
}

bool has_fp16_instructions() {
  __builtin_cpu_init();
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & (1u << 23)) != 0;
}

}  // namespace espalier::peer

#else

namespace espalier::peer {

Step<uint16_t> fp16_step(int, int) {
  return nullptr;
}
bool has_fp16_instructions() {
  return false;
}

}  // namespace espalier::peer

#endif
