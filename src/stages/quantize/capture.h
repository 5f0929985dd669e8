// Collects what a block's matrices see while calibration rows run through it: one Hessian per distinct input, and the
// FFN input with its routing table, from which every expert's own Hessian is made later.
//
// Matrices that share an input (wq_a, wkv and the compressor; wq_b and indexer.wq_b; w1 and w3) share a Hessian, fed by
// the first of them only. Routed experts never share: their Hessians come from the routing table, expert by expert (a
// shared one would hold the tokens of whichever expert ran first). Source: model specification 14, quality
// specification 1.3, 1.4.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/thread_pool.h"
#include "model/config.h"
#include "model/forward.h"
#include "model/names.h"
#include "stages/quantize/hessian.h"

namespace espalier {

// FFN inputs of one block for all calibration tokens, in row order.
struct MoeInputs {
  int64_t d_model = 0;
  int64_t n_active = 0;
  std::vector<float> x;        // [n_tokens, d_model]
  std::vector<int32_t> ids;    // [n_tokens, n_active]
  std::vector<float> weights;  // [n_tokens, n_active], routed scale included

  int64_t n_tokens() const { return d_model == 0 ? 0 : static_cast<int64_t>(x.size()) / d_model; }
};

// Tokens routed to one expert, ascending, with their weights.
struct ExpertTokens {
  std::vector<int32_t> tokens;
  std::vector<float> weights;
};
// One entry per expert.
std::vector<ExpertTokens> tokens_by_expert(const MoeInputs& inputs, int64_t n_experts);

// Name of the input that a matrix of this kind reads; equal names within a block share a Hessian. `is_drafter`: a
// stage's wkv also sees the backbone's taps, so it has an input of its own.
std::string input_name(const MatrixSpec& spec, bool is_drafter);

class BlockCapture : public LayerObserver {
 public:
  // specs: the matrices whose inputs are wanted; those that are not quantizable and routed experts are left out.
  BlockCapture(const std::vector<MatrixSpec>& specs, bool is_drafter, ThreadPool& pool);

  void linear_input(std::string_view stem, const float* x, int64_t n_rows, int64_t in) override;
  void moe_input(std::string_view block_prefix, const float* x, int64_t n_rows, int64_t d_model, const int32_t* ids,
                 const float* weights, int64_t n_active) override;

  // Ends accumulation. Hessian of the input that `spec` reads; null when nothing was seen.
  void finish();
  const Hessian* hessian_of(const MatrixSpec& spec) const;
  // The all-token mean of the FFN input, for the experts' prior.
  const Hessian* ffn_input() const;
  const MoeInputs& moe() const { return moe_; }

 private:
  struct Input {
    std::unique_ptr<HessianAccumulator> accumulator;
    Hessian hessian;
  };
  bool is_drafter_;
  ThreadPool& pool_;
  std::map<std::string, Input> inputs_;                      // by input_name
  std::map<std::string, std::string, std::less<>> leaders_;  // stem of the first matrix of an input -> input_name
  MoeInputs moe_;
};

}  // namespace espalier
