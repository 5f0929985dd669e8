#include "model/calibration_memory.h"

#include <algorithm>

#include "model/names.h"
#include "model/state.h"

namespace espalier {
namespace {

double entries_of(const Config& c, int source, int64_t n_tokens) {
  return static_cast<double>(n_tokens) / static_cast<double>(std::max(1, c.ratio(source)));
}

}  // namespace

StreamArithmetic stream_arithmetic(const Config& c, int64_t n_tokens) {
  StreamArithmetic out;
  out.tokens = n_tokens;
  const auto t = static_cast<double>(n_tokens);
  const auto d = static_cast<double>(c.d_model);
  const auto m = static_cast<double>(c.d_ff);
  const auto streams = static_cast<double>(c.n_streams);
  out.carried.push_back({"residual streams", t * streams * d * 2});
  out.carried.push_back({"residual streams, fp32", t * streams * d * 4});
  out.carried.push_back({"collapse weights, fp32", t * streams * 4});
  for (int source : c.kv_sources) {
    const std::string layer = "layer " + std::to_string(source);
    out.carried.push_back(
        {"compressed KV of " + layer, entries_of(c, source, n_tokens) * static_cast<double>(c.head_dim) * 2});
    out.carried.push_back(
        {"index keys of " + layer, entries_of(c, source, n_tokens) * static_cast<double>(c.index_head_dim) * 2});
  }
  if (!c.index_sources.empty())
    out.carried.push_back({"selected entries, int32", t * static_cast<double>(c.index_topk) * 4});
  if (c.candidate_source >= 0)
    out.carried.push_back({"candidate blocks, int32", t * static_cast<double>(c.candidate_topk_blocks) * 4});
  if (c.drafter.n_stages > 0)
    out.carried.push_back({"drafter taps", t * static_cast<double>(c.drafter.target_layers.size()) * d * 2});
  out.carried.push_back({"token ids, int32", t * 4});

  const auto active = static_cast<double>(c.n_active);
  const auto experts = static_cast<double>(c.n_experts);
  out.spilled.push_back({"FFN inputs", t * d * 2});
  out.spilled.push_back({"routing, int32 and fp32", t * active * 8});

  const double h1 = d * d * 4, h2 = m * m * 4;
  out.hessians.push_back({"w1 and w3 of one expert", h1});
  out.hessians.push_back({"w2 of one expert", h2});
  out.hessians.push_back({"all experts of a layer", experts * (h1 + h2)});
  out.hessians.push_back({"all experts of a layer, packed triangles", experts * 2 * (d * (d + 1) + m * (m + 1))});
  out.hessians.push_back({"inputs of one expert, bf16", experts > 0 ? t * active / experts * d * 2 : 0});

  out.tokens_per_expert = experts > 0 ? t * active / experts : 0;
  out.thin_below = out.tokens_per_expert > 0 ? d / out.tokens_per_expert : 0;
  out.gram_flop = 2 * t * active * (d * d + m * m) * static_cast<double>(c.n_layers);
  return out;
}

uint64_t row_state_bytes(const Config& c, int64_t n, int64_t draft_stride) {
  int64_t floats = c.n_layers * (c.window + SequenceState::kRewindRows) * c.head_dim;  // window rings
  const int64_t stream = c.n_streams * (c.d_model + 1);
  floats += n * (stream + 2);  // streams, collapse weights, ids, Engram history
  int64_t most_entries = 0;
  for (int source : c.kv_sources) {
    const int64_t ratio = std::max(1, c.ratio(source));
    const int64_t entries = n / ratio + 1;
    most_entries = std::max(most_entries, entries);
    floats += entries * c.head_dim + (entries + 31) * c.index_head_dim;
    floats += 2 * (ratio + SequenceState::kRewindRows + ratio) * c.head_dim;
  }
  floats += 2 * n * std::min(c.index_topk, most_entries) + 2 * n;  // a list that grows holds up to twice its entries
  if (c.drafter.n_stages > 0) {
    floats += n * static_cast<int64_t>(c.drafter.target_layers.size()) * c.d_model;
    if (draft_stride > 0) {
      floats += n * c.d_model;  // main_x
      floats += (n / draft_stride + 1) * c.drafter.block_size * (stream + 1);
    }
  }
  const int64_t candidate_bytes =
      c.candidate_source >= 0 ? n * (most_entries / std::max<int64_t>(1, c.candidate_block_size) + 1) : 0;
  return static_cast<uint64_t>(4 * floats + candidate_bytes);
}

uint64_t row_workspace_bytes(const Config& c, int64_t n) {
  int64_t least_ratio = 0;
  for (int source : c.kv_sources) {
    const int64_t ratio = std::max(1, c.ratio(source));
    least_ratio = least_ratio == 0 ? ratio : std::min(least_ratio, ratio);
  }
  const int64_t entries = least_ratio == 0 ? 0 : n / least_ratio + 1;
  const int64_t heads = c.n_heads * c.head_dim;
  const int64_t keys = c.window + std::min(c.index_topk, entries);
  const int64_t attention = 3 * heads + c.q_lora_rank + 6 * c.head_dim + 2 * c.o_groups * c.o_lora_rank + 4 * keys +
                            entries + c.index_n_heads * (c.index_head_dim + 1);
  const int64_t moe = 2 * c.n_active * (c.d_model + 2 * c.d_ff) + c.n_active * c.d_model + 2 * c.n_experts +
                      2 * c.d_ff + c.d_model;
  const int64_t engram = c.engram.layers.empty() ? 0 : c.engram.d_concat() + (c.n_streams + 1) * c.d_model +
                                                           2 * c.engram.n_columns();
  const int64_t block = 2 * c.d_model + 2 * c.n_streams * c.d_model + 3 * c.n_mix();
  return static_cast<uint64_t>(4 * n * (block + std::max({attention, moe, engram})));
}

uint64_t block_weight_bytes(const Config& c, bool with_experts) {
  uint64_t most = 0;
  for (int block = 0; block < c.n_layers + c.drafter.n_stages; ++block) {
    uint64_t bytes = 0;
    for (const MatrixSpec& spec : block_matrices(c, block)) {
      if (spec.expert < 0 || with_experts) bytes += static_cast<uint64_t>(spec.in * spec.out) * 4;
    }
    const bool is_drafter = block >= c.n_layers;
    bytes += static_cast<uint64_t>((is_drafter ? c.drafter.n_experts : c.n_experts) * c.d_model * 4);  // router
    bytes += static_cast<uint64_t>(2 * c.n_mix() * c.n_streams * c.d_model * 4);
    most = std::max(most, bytes);
  }
  return most;
}

}  // namespace espalier
