// The steps of the fp16-cost search over 32 lanes of 16 bits; included inside the anonymous namespace of a file that is
// compiled for one instruction set and defines before the inclusion:
//   Costs                      32 costs, ready to be added to
//   load_costs, broadcast_cost fp16 bits in memory -> Costs
//   Target(w).cost(costs, table)  Sums: costs + (table - w)^2, the difference rounded once, square and sum together once
//   least(Sums, Sums), finish(Sums)  the smaller ones; fp16 bits
#pragma once

// out[l], lane t: out-node t * 2^A + l, to memory in node order. A perfect shuffles inside 128-bit lanes leave 8
// consecutive nodes in each lane, lane j of vector i at 8 * (j * 2^A + i); then the lanes go where they belong.
template <int A>
[[gnu::always_inline]] inline void store_interleaved(const __m512i* out, uint16_t* next) {
  constexpr int kN = 1 << A;
  __m512i v[kN];
  for (int i = 0; i < kN; ++i) v[i] = out[i];
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
  const Target target(w);
  for (int g = 0; g < kGroups; g += kFp16Lanes) {
    Costs in[kIn];
    for (int q = 0; q < kIn; ++q) in[q] = load_costs(prev + q * kGroups + g);
    __m512i out[kOut];
    for (int l = 0; l < kOut; ++l) {
      Sums best = target.cost(in[0], table);
      for (int q = 1; q < kIn; ++q) best = least(best, target.cost(in[q], table + q * kFp16Lanes));
      out[l] = finish(best);
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
  const Target target(w);
  for (int g = 0; g < kGroups; ++g) {
    for (int l = 0; l < kOut; l += kFp16Lanes) {
      Sums best = target.cost(broadcast_cost(prev[g]), table);
      for (int q = 1; q < kIn; ++q) {
        best = least(best, target.cost(broadcast_cost(prev[q * kGroups + g]), table + q * kFp16Lanes));
      }
      table += kIn * kFp16Lanes;
      _mm512_storeu_si512(next + g * kOut + l, finish(best));
    }
  }
}

template <int A, int B>
constexpr Step<uint16_t> choose() {
  if constexpr (is_by_groups(A, B, kFp16Lanes)) return step_by_groups<A, B>;
  return step_by_nodes<A, B>;
}

inline Step<uint16_t> step_of(int a, int b) {
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
