// What running calibration rows through a network layer by layer takes: the arithmetic for a config, without any file. For
// a set of T tokens (the tables of quality.md 1.2 to 1.5), and for one row in this program's fp32 form.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/config.h"

namespace espalier {

struct SizedItem {
  std::string what;
  double bytes = 0;
};

// For T tokens of a network as a quantizer streams it.
struct StreamArithmetic {
  int64_t tokens = 0;
  std::vector<SizedItem> carried;   // between layers, bf16 unless the name says otherwise; selections at their most
  std::vector<SizedItem> spilled;   // per layer, on disk: FFN inputs and routing
  std::vector<SizedItem> hessians;  // fp32: of one expert, and what keeping a whole layer's would take
  double tokens_per_expert = 0;     // mean
  double thin_below = 0;            // experts rarer than this part of the mean have fewer than d_model tokens
  double gram_flop = 0;             // Hessians of all routed experts of all layers
};
StreamArithmetic stream_arithmetic(const Config& config, int64_t n_tokens);

// State of one row of n tokens between two layers: streams, caches, selections, taps, draft calls at one per
// `draft_stride` positions (0: none). Upper bound.
uint64_t row_state_bytes(const Config& config, int64_t n_tokens, int64_t draft_stride);
// What running one layer over a row of n tokens takes beside its state and weights. Upper bound.
uint64_t row_workspace_bytes(const Config& config, int64_t n_tokens);
// The largest block's matrices as fp32, or only those that are not routed experts.
uint64_t block_weight_bytes(const Config& config, bool with_experts);

}  // namespace espalier
