// One step of the trellis search for a whole cost vector; internal to the codec. Each tier fills a StepKernels with the
// instances of viterbi_steps_impl.h that its instruction set allows.
//
// A step takes in `in_bits` new bits; the step after it will take in `out_bits`. Both are K, except that they are K - 1/2 and
// K + 1/2 in turn at half-integer widths. Nodes before the step are numbered by the upper 16 - in_bits bits of the state, after it
// by the lower 16 - out_bits bits.
//   next[s & mask] = min over the 2^out_bits states s with these lower bits of prev[s >> in_bits] + error(code[s], w)
#pragma once

#include <cstdint>

#include "base/simd_tier.h"
#include "codec/trellis.h"

namespace espalier::codec {

// 16-bit costs. code and target are int16 in units of 1/unit; the error of one step is
//   K <= 4:  mulhrs(d, d) with d = code - w modulo 2^16, doubled with saturation at K = 4: d^2/32768, rounded
//   K >= 5:  min(|d|, 255)^2
// and sums saturate at 65535; viterbi_cost.h defines them number by number.
using Step16 = void (*)(const uint16_t* prev, uint16_t* next, const int16_t* table, int16_t w);
// fp32 costs: prev + (code - w)^2, three roundings.
using Step32 = void (*)(const float* prev, float* next, const float* table, float w);

inline constexpr int kMaxK2 = 16;

struct StepKernels {
  int lanes16 = 1;  // the table order depends on it, see table_index
  int lanes32 = 1;
  Step16 step16[kMaxK2 + 1][2] = {};  // by width in half bits and parity of the position
  Step32 step32[kMaxK2 + 1][2] = {};
  uint16_t (*subtract_minimum16)(uint16_t* costs, int size) = nullptr;  // costs -= min(costs); returns it
};

// How a step of this width fills vectors: with one out-node of consecutive groups, or with consecutive out-nodes of one group.
constexpr bool is_by_groups(int k2, int lanes) { return k2 <= 8 || (k2 == 10 && lanes == 32); }

// Where state s sits in the table that a step reads front to back.
constexpr int table_index(int state, int k2, int parity, int lanes) {
  const int in_bits = step_bits(k2, parity);
  const int out_bits = step_bits(k2, parity + 1);
  const int branch = state >> (16 - out_bits);                                      // q: which in-node group
  const int group = (state >> in_bits) & ((65536 >> (in_bits + out_bits)) - 1);  // g: shared by in- and out-node
  const int low = state & ((1 << in_bits) - 1);                                     // l: the new bits
  const int n_branches = 1 << out_bits;
  if (is_by_groups(k2, lanes)) return ((((group / lanes) << in_bits) + low) * n_branches + branch) * lanes + group % lanes;
  return ((group * n_branches + branch) << in_bits) + low;
}

const StepKernels& step_kernels_reference();
const StepKernels& step_kernels_baseline();
const StepKernels& step_kernels_avx2();
const StepKernels& step_kernels_avx512();

}  // namespace espalier::codec
