// The vectors of the search for the instruction set that the including .cpp is compiled for, written once with Highway. Each such
// file includes <hwy/highway.h> before this one and keeps everything but its entry point internal.
//
// Three things differ by target: NEON's multiplication saturates, AVX-512 clips by comparison masks, and it has permutes over two
// vectors of 512 bits, which Highway 1.0 does not offer. docs/decisions/codec-simd.md has the reasons and the times.
#pragma once

#include <type_traits>
#include <utility>

#include "codec/viterbi_order.h"
#include "codec/viterbi_steps_impl.h"

namespace espalier::codec {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

static_assert(!HWY_HAVE_SCALABLE, "the tables are laid out for a fixed number of lanes");

template <typename D, typename V>
HWY_INLINE void interleave(D d, V a, V b, V& lower, V& upper) {
  using DV = hn::DFromV<V>;
  lower = hn::BitCast(DV(), hn::InterleaveLower(d, hn::BitCast(d, a), hn::BitCast(d, b)));
  upper = hn::BitCast(DV(), hn::InterleaveUpper(d, hn::BitCast(d, a), hn::BitCast(d, b)));
}

template <int kInBits, int kStage, typename V>
HWY_INLINE void exchange_pair(V& first, V& second) {
  using D = hn::DFromV<V>;
  constexpr const Exchange& kExchange = kOrderPlan<kInBits, sizeof(hn::TFromD<D>), HWY_MAX_BYTES>.stage[kStage];
  const V a = first;
  const V b = second;
  if constexpr (kExchange.kind == ExchangeKind::kInterleave) {
    if constexpr (kExchange.element_bytes == 2) interleave(hn::Repartition<uint16_t, D>(), a, b, first, second);
    if constexpr (kExchange.element_bytes == 4) interleave(hn::Repartition<uint32_t, D>(), a, b, first, second);
    if constexpr (kExchange.element_bytes == 8) interleave(hn::Repartition<uint64_t, D>(), a, b, first, second);
  }
#if HWY_TARGET == HWY_AVX2
  if constexpr (kExchange.kind == ExchangeKind::kHalves) {
    first = hn::ConcatLowerLower(D(), b, a);
    second = hn::ConcatUpperUpper(D(), b, a);
  }
#endif
#if HWY_TARGET == HWY_AVX3
  if constexpr (kExchange.kind == ExchangeKind::kDwords) {
    const hn::Repartition<uint32_t, D> d;
    const auto permute = [&](const uint32_t* sources) {
      const __m512i index = hn::LoadU(d, sources).raw;
      return hn::BitCast(D(), hn::Vec512<uint32_t>{_mm512_permutex2var_epi32(hn::BitCast(d, a).raw, index, hn::BitCast(d, b).raw)});
    };
    first = permute(kExchange.lower.data());
    second = permute(kExchange.upper.data());
  }
#endif
}

template <int kInBits, typename V>
HWY_INLINE void to_memory_order(V* v, V* ordered) {
  constexpr const OrderPlan<kInBits>& kPlan = kOrderPlan<kInBits, sizeof(hn::TFromD<hn::DFromV<V>>), HWY_MAX_BYTES>;
  const auto stage = [&]<int s>(std::integral_constant<int, s>) {
    for (int i = 0; i < 1 << kInBits; ++i) {
      constexpr int kStep = 1 << kPlan.stage[s].vector_bit;
      if ((i & kStep) == 0) exchange_pair<kInBits, s>(v[i], v[i | kStep]);
    }
  };
  [&]<int... s>(std::integer_sequence<int, s...>) {
    (stage(std::integral_constant<int, s>()), ...);
  }(std::make_integer_sequence<int, kPlan.n_stages>());
  for (int i = 0; i < 1 << kInBits; ++i) ordered[kPlan.place[i]] = v[i];
}

struct IntegerLanes {
  using T = uint16_t;
  using C = int16_t;
  using D = hn::ScalableTag<uint16_t>;
  using DC = hn::ScalableTag<int16_t>;
  using V = hn::Vec<D>;
  using VC = hn::Vec<DC>;
  static constexpr int kLanes = HWY_MAX_BYTES / 2;
  static HWY_INLINE V load(const T* p) { return hn::LoadU(D(), p); }
  static HWY_INLINE void store(T* p, V v) { hn::StoreU(v, D(), p); }
  static HWY_INLINE VC load_code(const C* p) { return hn::LoadU(DC(), p); }
  static HWY_INLINE V broadcast(T x) { return hn::Set(D(), x); }
  static HWY_INLINE VC splat_code(C x) { return hn::Set(DC(), x); }
  static HWY_INLINE V add(V a, V b) { return hn::SaturatedAdd(a, b); }
  // The same; where there are masks, on other ports. For loops that are short of those that make minima.
  static HWY_INLINE V min_elsewhere(V a, V b) {
#if HWY_TARGET == HWY_AVX3
    return V{_mm512_mask_mov_epi16(b.raw, _mm512_cmplt_epu16_mask(a.raw, b.raw), a.raw)};
#else
    return min(a, b);
#endif
  }
  static HWY_INLINE V subtract(V a, V b) { return hn::Sub(a, b); }
  static HWY_INLINE V min(V a, V b) { return hn::Min(a, b); }
  template <CostRule kRule>
  static HWY_INLINE V error(VC code, VC w) {
    const D du;
    VC d = hn::Sub(code, w);
    if constexpr (kRule == CostRule::kClipped) {
#if HWY_TARGET == HWY_AVX3
      // |d| > 255 as one unsigned comparison: masks are made on another port than minima and absolute values.
      const V u = hn::BitCast(du, d);
      const __mmask32 near = _mm512_cmple_epu16_mask(hn::Add(u, hn::Set(du, 255)).raw, hn::Set(du, 510).raw);
      return V{_mm512_mask_mullo_epi16(hn::Set(du, 255 * 255).raw, near, u.raw, u.raw)};
#else
      const V magnitude = hn::Min(hn::BitCast(du, hn::Abs(d)), hn::Set(du, 255));
      return hn::Mul(magnitude, magnitude);
#endif
    } else {
      if constexpr (kRule == CostRule::kDoubled) d = hn::SaturatedAdd(d, d);
      const VC square = hn::MulFixedPoint15(d, d);
#if HWY_TARGET == HWY_NEON
      // (-32768)^2 is 32768 as an unsigned number; this multiplication saturates to 32767.
      return hn::BitCast(du, hn::Sub(square, hn::VecFromMask(DC(), hn::Eq(d, hn::Set(DC(), -32768)))));
#else
      return hn::BitCast(du, square);
#endif
    }
  }
  template <int kInBits>
  static HWY_INLINE void order(V* results, V* ordered) {
    to_memory_order<kInBits>(results, ordered);
  }
};

struct FloatLanes {
  using T = float;
  using C = float;
  using D = hn::ScalableTag<float>;
  using V = hn::Vec<D>;
  static constexpr int kLanes = HWY_MAX_BYTES / 4;
  static HWY_INLINE V load(const T* p) { return hn::LoadU(D(), p); }
  static HWY_INLINE void store(T* p, V v) { hn::StoreU(v, D(), p); }
  static HWY_INLINE V load_code(const C* p) { return load(p); }
  static HWY_INLINE V broadcast(T x) { return hn::Set(D(), x); }
  static HWY_INLINE V splat_code(C x) { return broadcast(x); }
  static HWY_INLINE V add(V a, V b) { return hn::Add(a, b); }
  static HWY_INLINE V min(V a, V b) { return hn::Min(a, b); }
  static HWY_INLINE V min_elsewhere(V a, V b) { return min(a, b); }
  template <CostRule kRule>
  static HWY_INLINE V error(V code, V w) {
    const V d = hn::Sub(code, w);
    return hn::Mul(d, d);
  }
  template <int kInBits>
  static HWY_INLINE void order(V* results, V* ordered) {
    to_memory_order<kInBits>(results, ordered);
  }
};

}  // namespace
}  // namespace espalier::codec
