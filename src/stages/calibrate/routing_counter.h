// Counts what routing does while rows run: per block, expert and domain the tokens, the routing weights and the squared
// outputs.
//
// An expert's energy is sum_t g^2 |W2 h|^2 over its tokens, a block's sum_t |y|^2 of the routed output y; their quotient
// is the share of quality.md 2.3. Every token gives one fp64 number per expert (one chain over ascending channels), and
// tokens are added in the order in which rows are run: bytes depend on the rows' order, not on threads or on the SIMD
// tier. A token with a non-finite input, weight or output is left out and counted.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "base/thread_pool.h"
#include "model/expert_pruning.h"
#include "model/forward.h"
#include "model/routing_statistics.h"

namespace espalier {

// Blocks of one kind: backbone layers, or drafter stages.
class RoutingCounter : public LayerObserver {
 public:
  // pruning: also count which experts stay when pruned as served.
  RoutingCounter(int n_blocks, int64_t n_experts, int64_t n_domains, std::optional<ExpertPruning> pruning,
                 ThreadPool& pool);

  // What the next calls belong to: block in [0, n_blocks), domain in [0, n_domains).
  void begin_row(int block, int64_t domain);
  // Whether a token was left out since begin_row.
  bool has_dropped() const { return row_dropped_; }

  void moe_input(std::string_view block_prefix, const float* x, int64_t n_rows, int64_t d_model, const int32_t* ids,
                 const float* weights, int64_t n_active) override;
  void expert_outputs(std::string_view block_prefix, const float* outputs, int64_t n_rows, int64_t n_active,
                      int64_t d_model) override;

  const RoutingCounts& counts() const { return counts_; }
  const std::vector<int64_t>& served() const { return served_; }  // [n_blocks, n_experts]; empty without pruning
  int64_t dropped() const { return dropped_; }                    // tokens, over all blocks

  // energy / output_energy: [n_blocks, n_experts, n_domains]; 0 where a domain has no output.
  std::vector<float> shares() const;
  // Tokens of an expert, all domains, per token of the block: [n_blocks, n_experts].
  std::vector<float> reads_routed() const;
  std::vector<float> reads_served() const;  // empty without pruning

 private:
  std::vector<float> per_position(const std::vector<int64_t>& per_expert) const;
  std::vector<int64_t> tokens_of_experts() const;

  int64_t n_blocks_, n_experts_, n_domains_;
  std::optional<ExpertPruning> pruning_;
  ThreadPool& pool_;
  RoutingCounts counts_;
  std::vector<int64_t> served_;
  int64_t dropped_ = 0;

  int block_ = 0;
  int64_t domain_ = 0;
  bool row_dropped_ = false;
  std::vector<int32_t> ids_;      // of the last moe_input
  std::vector<float> weights_;    // of the last moe_input
  std::vector<uint8_t> finite_;   // [n_rows] its inputs and weights
};

}  // namespace espalier
