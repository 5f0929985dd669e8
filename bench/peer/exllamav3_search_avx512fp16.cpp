// Compiled for AVX512-FP16 where the compiler knows it; everything but the two entry points is internal.
#include "bench/peer/exllamav3_steps.h"

#if defined(__AVX512FP16__)
// GCC 12's own headers read a deliberately undefined operand of unmasked operations.
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <cpuid.h>
#include <immintrin.h>

namespace espalier::peer {
namespace {

using V = __m512h;

V load(const uint16_t* p) {
  return _mm512_castsi512_ph(_mm512_loadu_si512(p));
}
void store(uint16_t* p, V v) {
  _mm512_storeu_si512(p, _mm512_castph_si512(v));
}
V broadcast(uint16_t x) {
  return _mm512_castsi512_ph(_mm512_set1_epi16(static_cast<short>(x)));
}

// prev + (code - w)^2: the difference rounded once, square and sum rounded together once.
V cost(V prev, V code, V w) {
  const V d = _mm512_sub_ph(code, w);
  return _mm512_fmadd_ph(d, d, prev);
}

// out[l], lane t: out-node t * 2^A + l, to memory in node order. A perfect shuffles inside 128-bit lanes leave 8
// consecutive nodes in each lane, lane j of vector i at 8 * (j * 2^A + i); then the lanes go where they belong.
template <int A>
[[gnu::always_inline]] inline void store_interleaved(const V* out, uint16_t* next) {
  constexpr int kN = 1 << A;
  __m512i v[kN];
  for (int i = 0; i < kN; ++i) v[i] = _mm512_castph_si512(out[i]);
  for (int stage = 0; stage < A; ++stage) {
    __m512i mixed[kN];
    for (int i = 0; i < kN / 2; ++i) {
      mixed[2 * i] = _mm512_unpacklo_epi16(v[i], v[i + kN / 2]);
      mixed[2 * i + 1] = _mm512_unpackhi_epi16(v[i], v[i + kN / 2]);
    }
    for (int i = 0; i < kN; ++i) v[i] = mixed[i];
  }
  if constexpr (A == 1) {
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    _mm512_storeu_si512(next, _mm512_permutex2var_epi64(v[0], first, v[1]));
    _mm512_storeu_si512(next + 32, _mm512_permutex2var_epi64(v[0], second, v[1]));
  } else {
    for (int i = 0; i < kN; i += 4) {                                    // four vectors: a 4x4 transposition of lanes
      const __m512i a = _mm512_shuffle_i64x2(v[i], v[i + 1], 0x44);      // a0 a1 b0 b1
      const __m512i b = _mm512_shuffle_i64x2(v[i], v[i + 1], 0xEE);      // a2 a3 b2 b3
      const __m512i c = _mm512_shuffle_i64x2(v[i + 2], v[i + 3], 0x44);  // c0 c1 d0 d1
      const __m512i d = _mm512_shuffle_i64x2(v[i + 2], v[i + 3], 0xEE);
      uint16_t* to = next + 8 * i;
      _mm512_storeu_si512(to, _mm512_shuffle_i64x2(a, c, 0x88));
      _mm512_storeu_si512(to + 8 * kN, _mm512_shuffle_i64x2(a, c, 0xDD));
      _mm512_storeu_si512(to + 16 * kN, _mm512_shuffle_i64x2(b, d, 0x88));
      _mm512_storeu_si512(to + 24 * kN, _mm512_shuffle_i64x2(b, d, 0xDD));
    }
  }
}

template <int A, int B>
void step_by_groups(const uint16_t* prev, uint16_t* next, const uint16_t* table, uint16_t w) {
  constexpr int kGroups = 1 << (16 - A - B);
  constexpr int kIn = 1 << B;
  constexpr int kOut = 1 << A;
  const V target = broadcast(w);
  for (int g = 0; g < kGroups; g += kFp16Lanes) {
    V in[kIn];
    for (int q = 0; q < kIn; ++q) in[q] = load(prev + q * kGroups + g);
    V out[kOut];
    for (int l = 0; l < kOut; ++l) {
      V best = cost(in[0], load(table), target);
      for (int q = 1; q < kIn; ++q) best = _mm512_min_ph(best, cost(in[q], load(table + q * kFp16Lanes), target));
      out[l] = best;
      table += kIn * kFp16Lanes;
    }
    store_interleaved<A>(out, next + g * kOut);
  }
}

template <int A, int B>
void step_by_nodes(const uint16_t* prev, uint16_t* next, const uint16_t* table, uint16_t w) {
  constexpr int kGroups = 1 << (16 - A - B);
  constexpr int kIn = 1 << B;
  constexpr int kOut = 1 << A;
  const V target = broadcast(w);
  for (int g = 0; g < kGroups; ++g) {
    for (int l = 0; l < kOut; l += kFp16Lanes) {
      V best = cost(broadcast(prev[g]), load(table), target);
      for (int q = 1; q < kIn; ++q) {
        best = _mm512_min_ph(best, cost(broadcast(prev[q * kGroups + g]), load(table + q * kFp16Lanes), target));
      }
      table += kIn * kFp16Lanes;
      store(next + g * kOut + l, best);
    }
  }
}

template <int A, int B>
constexpr Step<uint16_t> choose() {
  if constexpr (is_by_groups(A, B, kFp16Lanes)) return step_by_groups<A, B>;
  return step_by_nodes<A, B>;
}

}  // namespace

Step<uint16_t> fp16_step(int a, int b) {
  if (a == b) {
    constexpr Step<uint16_t> kWhole[8] = {choose<1, 1>(),      choose<2, 2>(),     choose<3, 3>(),
                                          choose<4, 4>(),      choose<5, 5>(),     step_by_nodes<6, 6>,
                                          step_by_nodes<7, 7>, step_by_nodes<8, 8>};
    return kWhole[a - 1];
  }
  switch (10 * a + b) {
    case 12:
      return choose<1, 2>();
    case 21:
      return choose<2, 1>();
    case 23:
      return choose<2, 3>();
    case 32:
      return choose<3, 2>();
    case 34:
      return choose<3, 4>();
    case 43:
      return choose<4, 3>();
  }
  return nullptr;
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
