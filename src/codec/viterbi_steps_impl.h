// Bodies of the search steps over a vector type; included by one .cpp per instruction set, everything in an unnamed namespace
// so that no instance leaks into another tier.
//
// `Lanes` offers: T (cost), C (code), V (vector), kLanes, load, store, load_code, broadcast, splat_code, error<K>(code, w),
// add (saturating for integers), min, and interleave(a, b, lo, hi) over the whole vector.
#pragma once

#include "codec/viterbi_steps.h"

namespace espalier::codec {
namespace {

// K <= 4. A vector holds consecutive groups g; the 2^K in-costs of a group serve all 2^K out-nodes, and K perfect shuffles
// bring the results back to node order.
template <typename Lanes, int K>
void step_by_groups(const typename Lanes::T* prev, typename Lanes::T* next, const typename Lanes::C* table,
                    typename Lanes::C w) {
  using V = typename Lanes::V;
  constexpr int kBranches = 1 << K;
  constexpr int kGroups = 65536 >> (2 * K);
  constexpr int kLanes = Lanes::kLanes;
  const auto target = Lanes::splat_code(w);
  for (int g = 0; g < kGroups; g += kLanes) {
    V in[kBranches];
    for (int q = 0; q < kBranches; ++q) in[q] = Lanes::load(prev + q * kGroups + g);
    V out[kBranches];
    for (int l = 0; l < kBranches; ++l) {
      V best = Lanes::add(in[0], Lanes::template error<K>(Lanes::load_code(table), target));
      for (int q = 1; q < kBranches; ++q) {
        const V cost = Lanes::add(in[q], Lanes::template error<K>(Lanes::load_code(table + q * kLanes), target));
        best = Lanes::min(best, cost);
      }
      out[l] = best;
      table += kBranches * kLanes;
    }
    for (int stage = 0; stage < K; ++stage) {
      V mixed[kBranches];
      for (int i = 0; i < kBranches / 2; ++i) {
        Lanes::interleave(out[i], out[i + kBranches / 2], mixed[2 * i], mixed[2 * i + 1]);
      }
      for (int i = 0; i < kBranches; ++i) out[i] = mixed[i];
    }
    for (int i = 0; i < kBranches; ++i) Lanes::store(next + g * kBranches + i * kLanes, out[i]);
  }
}

// K >= 5. A vector holds consecutive out-nodes of one group, so the in-cost of a branch is one number.
template <typename Lanes, int K>
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
        best[v] = Lanes::add(in0, Lanes::template error<K>(Lanes::load_code(codes + (first + v) * kLanes), target));
      }
      for (int q = 1; q < kBranches; ++q) {
        const V in = Lanes::broadcast(prev[q * kGroups + g]);
        const typename Lanes::C* row = codes + q * kBranches + first * kLanes;
        for (int v = 0; v < kTogether; ++v) {
          best[v] = Lanes::min(best[v], Lanes::add(in, Lanes::template error<K>(Lanes::load_code(row + v * kLanes), target)));
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

template <typename Lanes16, typename Lanes32>
StepKernels make_step_kernels() {
  StepKernels s;
  s.lanes16 = Lanes16::kLanes;
  s.lanes32 = Lanes32::kLanes;
  s.step16[1] = step_by_groups<Lanes16, 1>;
  s.step16[2] = step_by_groups<Lanes16, 2>;
  s.step16[3] = step_by_groups<Lanes16, 3>;
  s.step16[4] = step_by_groups<Lanes16, 4>;
  s.step16[5] = step_by_nodes<Lanes16, 5>;
  s.step16[6] = step_by_nodes<Lanes16, 6>;
  s.step16[7] = step_by_nodes<Lanes16, 7>;
  s.step16[8] = step_by_nodes<Lanes16, 8>;
  s.step32[1] = step_by_groups<Lanes32, 1>;
  s.step32[2] = step_by_groups<Lanes32, 2>;
  s.step32[3] = step_by_groups<Lanes32, 3>;
  s.step32[4] = step_by_groups<Lanes32, 4>;
  s.step32[5] = step_by_nodes<Lanes32, 5>;
  s.step32[6] = step_by_nodes<Lanes32, 6>;
  s.step32[7] = step_by_nodes<Lanes32, 7>;
  s.step32[8] = step_by_nodes<Lanes32, 8>;
  s.subtract_minimum16 = subtract_minimum<Lanes16>;
  return s;
}

}  // namespace
}  // namespace espalier::codec
