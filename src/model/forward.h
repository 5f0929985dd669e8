// The forward pass. A whole forward IS the loop over layers:
//
//   StreamState s;  begin_call(...);  for L: run_layer(weights of L, L, s, ...);  finish_call(...) -> logits
//
// so a quantizer that streams layers uses the same code and gets the same bits as a monolithic forward. Rows are
// independent of how a prompt is cut into calls: prefill, chunked prefill and token-by-token decoding give equal bits
// in `full` and `kvq`. State carried between layers inside a call: streams h, collapse weights pre, selected entries,
// candidate blocks, taps (StreamState); state carried between calls: SequenceState. Source: model.md sections 4 to 7;
// docs/model.md.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "model/config.h"
#include "model/numerics.h"
#include "model/state.h"
#include "model/weights.h"
#include "tensor/view.h"

namespace espalier {

// Sees the inputs of matrices while a call runs. Pointers are valid during the call only; called on the calling thread,
// in a fixed order.
class LayerObserver {
 public:
  virtual ~LayerObserver() = default;
  // x [n_rows, in] enters the matrix `stem` (names.h stems: also each wo_a slice, compressor, indexer.wq_b, indexer.wk,
  // shared experts, engram.wkv, head, main_proj and the drafter's). Several stems with the same input are reported one
  // by one. n_rows may differ from the call's tokens (indexer.wk sees completed entries only).
  virtual void linear_input(std::string_view stem, const float* x, int64_t n_rows, int64_t in) {
    (void)stem, (void)x, (void)n_rows, (void)in;
  }
  // The routed experts of `block_prefix` ("layers.3."): x [n_rows, D] after ffn_norm, ids and weights [n_rows,
  // n_active] (ids ascending per row; weights include the routed scale). Expert inputs follow from these; see moe.h.
  virtual void moe_input(std::string_view block_prefix, const float* x, int64_t n_rows, int64_t d_model,
                         const int32_t* ids, const float* weights, int64_t n_active) {
    (void)block_prefix, (void)x, (void)n_rows, (void)d_model, (void)ids, (void)weights, (void)n_active;
  }
  // What they made of those rows, right after moe_input: outputs [n_rows, n_active, D] in the order of its ids, routing
  // weight included. Their sum over n_active is the routed part of the sub-layer's output.
  virtual void expert_outputs(std::string_view block_prefix, const float* outputs, int64_t n_rows, int64_t n_active,
                              int64_t d_model) {
    (void)block_prefix, (void)outputs, (void)n_rows, (void)n_active, (void)d_model;
  }
  // Named intermediate values for comparisons with recorded references: "attn.in", "attn.out", "ffn.in", "ffn.out",
  // "hc.attn_pre", "hc.attn_post", "hc.attn_comb" (and ffn_), "stream.out", "engram.out", "router.scores", "core.q",
  // "core.o" and "hidden" (block -1, after the final norm), as [n_rows, cols] f32.
  virtual void value(int block, std::string_view what, const float* x, int64_t n_rows, int64_t cols) {
    (void)block, (void)what, (void)x, (void)n_rows, (void)cols;
  }
  // Scores of the visible entries of an index source before the selection: row t has n_visible[t] of them at begin[t].
  virtual void index_scores(int block, const float* scores, const int64_t* begin, const int64_t* n_visible,
                            int64_t n_rows) {
    (void)block, (void)scores, (void)begin, (void)n_visible, (void)n_rows;
  }
  // The table rows of an Engram layer, [n_rows, n_columns].
  virtual void engram_table_rows(int block, const int64_t* rows, int64_t n_rows, int64_t n_columns) {
    (void)block, (void)rows, (void)n_rows, (void)n_columns;
  }
};

// Entries selected for each row of a call, ascending.
struct SelectedEntries {
  std::vector<int64_t> begin;  // [n_rows + 1]
  std::vector<int32_t> entries;
};

// A call in flight: T rows of one sequence at positions start .. start + T - 1.
struct StreamState {
  std::vector<int32_t> ids;  // [T]
  int64_t start = 0;
  Tensor h;                         // [T, HC, D] residual streams
  Tensor pre;                       // [T, HC] collapse weights from the previous sub-layer
  SelectedEntries selected;         // of the last index source that ran
  std::vector<uint8_t> candidates;  // [T, n_blocks] of the candidate source, row-major; empty: none yet
  int64_t n_candidate_blocks = 0;
  Tensor taps;  // [T, n_taps*D] drafter input; empty without drafter

  int64_t n_rows() const { return static_cast<int64_t>(ids.size()); }
};

struct ForwardOptions {
  Numerics numerics = Numerics::kKvq;
  bool all_logits = false;  // logits of every row, else of the last one
  int64_t chunk = 256;      // rows per pass through the layers; does not change the result
  LayerObserver* observer = nullptr;
};

struct ForwardResult {
  Tensor logits;  // [rows or 1, V] f32
  Tensor taps;    // [rows, n_taps*D] f32 drafter input of every row; empty without drafter
};

// A loaded model. Threads: immutable; many sequences may use it, each with its own state and pool.
class Model {
 public:
  // Loads everything. Errors as WeightLoader.
  static Result<std::shared_ptr<const Model>> load(const std::string& dir, const LoadOptions& options,
                                                   ThreadPool& pool);

  const Config& config() const { return config_; }
  const std::string& dir() const { return dir_; }
  std::string tokenizer_path() const { return dir_ + "/tokenizer.json"; }
  const Coverage& coverage() const { return coverage_; }

  // The parts, for code that walks layers itself.
  GlobalWeights globals;
  std::vector<BlockWeights> layers;       // [n_layers]
  std::vector<BlockWeights> stages;       // [n_stages] drafter
  DrafterGlobals drafter;                 // empty without drafter
  std::vector<EngramHash> engram_hashes;  // per Engram layer
  std::vector<int32_t> engram_token_map;

 private:
  Model() = default;
  Config config_;
  std::string dir_;
  Coverage coverage_;
  std::shared_ptr<const void> files_;  // keeps mapped files alive
};

// Feeds ids at positions state.n_tokens() .. ; on success the state has advanced by ids.size().
// Errors: invalid_argument for an empty call, an id out of range, an image token; resource_exhausted past
// max_positions; data_loss for a damaged Engram row. After an error the state must be reset or truncated to a position
// before the call.
Result<ForwardResult> forward(const Model& model, SequenceState& state, std::span<const int32_t> ids,
                              const ForwardOptions& options, ThreadPool& pool);

// --- layer by layer ---

struct CallContext {  // what every step of a call needs
  const Config& config;
  const std::vector<EngramHash>& engram_hashes;
  const std::vector<int32_t>& engram_token_map;
  Numerics numerics;
  ThreadPool& pool;
  LayerObserver* observer = nullptr;
};

// Checks the ids and fills h (embedding rows in every copy) and pre = (1, 0, …); appends to the Engram history.
Status begin_call(const CallContext& context, const GlobalWeights& globals, SequenceState& state,
                  std::span<const int32_t> ids, StreamState* stream);
// One backbone layer over all rows: updates stream (h, pre, selected, candidates, taps) and the state's caches of layer
// L. `weights` may be native or quantized.
Status run_layer(const CallContext& context, const BlockWeights& weights, int layer, SequenceState& state,
                 StreamState& stream);
// Final collapse, norm and head. logits [T or 1, V]; advances the state.
Tensor finish_call(const CallContext& context, const GlobalWeights& globals, SequenceState& state,
                   const StreamState& stream, bool all_logits);

}  // namespace espalier
