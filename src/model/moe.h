// The mixture of experts of one block: router, routed experts, shared expert. Source: model.md section 6.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "model/forward.h"

namespace espalier {

// The routed experts of each row. ids ascending per row; weights[i] belongs to ids[i] and includes the routed scale.
struct Routing {
  int64_t n_active = 0;
  std::vector<int32_t> ids;    // [n_rows, n_active]
  std::vector<float> weights;  // [n_rows, n_active]
};

// x [n_rows, D]. Ties go to the lower expert id. `block` only labels observations.
Routing route(const CallContext& context, const MoeWeights& weights, const float* x, int64_t n_rows, int64_t n_active,
              int block);

// The input of w2 for one expert: z[n_rows, d_ff] = silu(min(w1 x, limit)) * clamp(w3 x, +-limit), times gate[row]
// unless null.
void expert_hidden(const CallContext& context, const ExpertWeights& expert, const float* x, int64_t n_rows,
                   const float* gate, float* z);

// y [n_rows, D] = routed experts (ascending id) + shared expert.
void run_moe(const CallContext& context, const MoeWeights& weights, int block, const float* x, int64_t n_rows,
             float* y);

}  // namespace espalier
