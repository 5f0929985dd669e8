// Bodies of the search steps over a vector type; included by one .cpp per instruction set, everything in an unnamed namespace
// so that no instance leaks into another tier.
//
// `Lanes` offers: T (cost), C (code), V (vector), kLanes, load, store, load_code, broadcast, splat_code, error<rule>(code, w),
// add (saturating for integers), min, and interleave(a, b, lo, hi) over the whole vector.
#pragma once

#include "codec/viterbi_cost.h"
#include "codec/viterbi_steps.h"

namespace espalier::codec {
namespace {

// A vector holds consecutive groups g; the 2^out_bits in-costs of a group serve all 2^in_bits out-nodes, and in_bits
// perfect shuffles bring the results back to node order.
template <typename Lanes, CostRule kRule, int kInBits, int kOutBits>
void step_by_groups(const typename Lanes::T* prev, typename Lanes::T* next, const typename Lanes::C* table,
                    typename Lanes::C w) {
  using V = typename Lanes::V;
  constexpr int kBranches = 1 << kOutBits;
  constexpr int kResults = 1 << kInBits;
  constexpr int kGroups = 65536 >> (kInBits + kOutBits);
  constexpr int kLanes = Lanes::kLanes;
  const auto target = Lanes::splat_code(w);
  for (int g = 0; g < kGroups; g += kLanes) {
    V in[kBranches];
    for (int q = 0; q < kBranches; ++q) in[q] = Lanes::load(prev + q * kGroups + g);
    V out[kResults];
    for (int l = 0; l < kResults; ++l) {
      V best = Lanes::add(in[0], Lanes::template error<kRule>(Lanes::load_code(table), target));
      for (int q = 1; q < kBranches; ++q) {
        const V cost = Lanes::add(in[q], Lanes::template error<kRule>(Lanes::load_code(table + q * kLanes), target));
        best = kRule == CostRule::kDoubled && q % 4 == 3 ? Lanes::min_elsewhere(cost, best) : Lanes::min(cost, best);
      }
      out[l] = best;
      table += kBranches * kLanes;
    }
    V ordered[kResults];
    Lanes::template order<kInBits>(out, ordered);
    for (int i = 0; i < kResults; ++i) Lanes::store(next + g * kResults + i * kLanes, ordered[i]);
  }
}

// A vector holds consecutive out-nodes of one group, so the in-cost of a branch is one number.
template <typename Lanes, CostRule kRule, int K>
void step_by_nodes(const typename Lanes::T* prev, typename Lanes::T* next, const typename Lanes::C* table,
                   typename Lanes::C w) {
  using V = typename Lanes::V;
  constexpr int kBranches = 1 << K;
  constexpr int kGroups = 65536 >> (2 * K);
  constexpr int kLanes = Lanes::kLanes;
  constexpr int kVectors = kBranches / kLanes;
  constexpr int kTogether = kVectors < 8 ? kVectors : 8;  // accumulators that stay in registers
  const auto target = Lanes::splat_code(w);
  for (int g = 0; g < kGroups; ++g) {
    const typename Lanes::C* codes = table + g * kBranches * kBranches;
    for (int first = 0; first < kVectors; first += kTogether) {
      V best[kTogether];
      const V in0 = Lanes::broadcast(prev[g]);
      for (int v = 0; v < kTogether; ++v) {
        best[v] = Lanes::add(in0, Lanes::template error<kRule>(Lanes::load_code(codes + (first + v) * kLanes), target));
      }
      for (int q = 1; q < kBranches; ++q) {
        const V in = Lanes::broadcast(prev[q * kGroups + g]);
        const typename Lanes::C* row = codes + q * kBranches + first * kLanes;
        for (int v = 0; v < kTogether; ++v) {
          best[v] = Lanes::min(best[v], Lanes::add(in, Lanes::template error<kRule>(Lanes::load_code(row + v * kLanes), target)));
        }
      }
      for (int v = 0; v < kTogether; ++v) Lanes::store(next + g * kBranches + (first + v) * kLanes, best[v]);
    }
  }
}

template <typename Lanes>
typename Lanes::T subtract_minimum(typename Lanes::T* costs, int size) {
  constexpr int kLanes = Lanes::kLanes;
  typename Lanes::V low = Lanes::load(costs);
  for (int i = kLanes; i < size; i += kLanes) low = Lanes::min(low, Lanes::load(costs + i));
  typename Lanes::T values[kLanes];
  Lanes::store(values, low);
  typename Lanes::T least = values[0];
  for (int i = 1; i < kLanes; ++i) least = values[i] < least ? values[i] : least;
  const typename Lanes::V amount = Lanes::broadcast(least);
  for (int i = 0; i < size; i += kLanes) Lanes::store(costs + i, Lanes::subtract(Lanes::load(costs + i), amount));
  return least;
}

template <typename Lanes, int k2, int kParity>
constexpr auto step_of() {
  constexpr CostRule kRule = cost_rule(k2);
  constexpr int kInBits = step_bits(k2, kParity);
  constexpr int kOutBits = step_bits(k2, kParity + 1);
  if constexpr (is_by_groups(k2, Lanes::kLanes)) return step_by_groups<Lanes, kRule, kInBits, kOutBits>;
  else return step_by_nodes<Lanes, kRule, kInBits>;
}

template <typename Lanes16, typename Lanes32, int k2>
void add_steps(StepKernels& s) {
  s.step16[k2][0] = step_of<Lanes16, k2, 0>();
  s.step16[k2][1] = step_of<Lanes16, k2, 1>();
  s.step32[k2][0] = step_of<Lanes32, k2, 0>();
  s.step32[k2][1] = step_of<Lanes32, k2, 1>();
}

template <typename Lanes16, typename Lanes32>
StepKernels make_step_kernels() {
  StepKernels s;
  s.lanes16 = Lanes16::kLanes;
  s.lanes32 = Lanes32::kLanes;
  add_steps<Lanes16, Lanes32, 2>(s);
  add_steps<Lanes16, Lanes32, 3>(s);
  add_steps<Lanes16, Lanes32, 4>(s);
  add_steps<Lanes16, Lanes32, 5>(s);
  add_steps<Lanes16, Lanes32, 6>(s);
  add_steps<Lanes16, Lanes32, 7>(s);
  add_steps<Lanes16, Lanes32, 8>(s);
  add_steps<Lanes16, Lanes32, 10>(s);
  add_steps<Lanes16, Lanes32, 12>(s);
  add_steps<Lanes16, Lanes32, 14>(s);
  add_steps<Lanes16, Lanes32, 16>(s);
  s.subtract_minimum16 = subtract_minimum<Lanes16>;
  return s;
}

}  // namespace
}  // namespace espalier::codec
