// One step of the trellis search for a whole cost vector; internal to the codec. Each tier fills a StepKernels with the
// instances of viterbi_steps_impl.h that its instruction set allows.
//
// Nodes before a step are numbered by the upper 16-K bits of the state (in-node s >> K), after it by the lower 16-K bits.
//   next[s & mask] = min over the 2^K states s with these lower bits of prev[s >> K] + error(code[s], w)
#pragma once

#include <cstdint>

#include "codec/simd_tier.h"

namespace espalier::codec {

// 16-bit costs. code and target are int16 in units of 1/unit; the error of one step is
//   K <= 4:  mulhrs(d, d) with d = code - w modulo 2^16, doubled with saturation at K = 4: d^2/32768, rounded
//   K >= 5:  min(|d|, 255)^2
// and sums saturate at 65535; viterbi_cost.h defines them number by number.
using Step16 = void (*)(const uint16_t* prev, uint16_t* next, const int16_t* table, int16_t w);
// fp32 costs: prev + (code - w)^2, three roundings.
using Step32 = void (*)(const float* prev, float* next, const float* table, float w);

struct StepKernels {
  int lanes16 = 1;  // the table order depends on it, see table_index
  int lanes32 = 1;
  Step16 step16[9] = {};  // by K, 1..8
  Step32 step32[9] = {};
  uint16_t (*subtract_minimum16)(uint16_t* costs, int size) = nullptr;  // costs -= min(costs); returns it
};

// Where state s sits in the table that a step reads front to back.
constexpr int table_index(int state, int width, int lanes) {
  const int branch = state >> (16 - width);                        // q: which in-node group
  const int group = (state >> width) & ((65536 >> (2 * width)) - 1);  // g: shared by in- and out-node
  const int low = state & ((1 << width) - 1);                      // l: the new bits
  const int n = 1 << width;
  if (width <= 4) return ((group / lanes * n + low) * n + branch) * lanes + group % lanes;
  return (group * n + branch) * n + low;
}

const StepKernels& step_kernels_portable();
const StepKernels& step_kernels_sse4();
const StepKernels& step_kernels_avx2();
const StepKernels& step_kernels_avx512();

}  // namespace espalier::codec
