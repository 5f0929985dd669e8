// All weights of the network: one page with shapes, and the loader that fills it from a checkpoint or pack, whole or
// one block at a time. Shapes are [out, in] as stored; a Linear computes y = x * W^T of that. D = d_model, V = vocab,
// HC = n_streams.
//
// The loader decides per matrix by presence: `<stem>.trellis` makes EXL3, else `<stem>.weight` (+ `.scale`). Everything
// the network needs must be there exactly once with the right type and shape; NaN and infinity are refused. Engram
// tables are only mapped. Source: model.md section 2; docs/model.md shows how the parts are used.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/progress.h"
#include "base/status.h"
#include "model/config.h"
#include "model/engram.h"
#include "model/linear.h"

namespace espalier {

class TensorIndex;

struct MixWeights {          // mHC of one sub-layer
  Linear fn;                 // [HC*(2+HC), HC*D] f32
  std::vector<float> base;   // [HC*(2+HC)]
  std::vector<float> scale;  // [3]: pre, post, comb
};

struct CompressorWeights {  // kv sources only
  Linear wkv;               // [head_dim, D]
  Linear wgate;             // [head_dim, D]; empty at ratio 1
  std::vector<float> norm;  // [head_dim]
};

struct IndexerWeights {       // index sources only
  Linear wq_b;                // [index_n_heads*index_head_dim, q_lora_rank]
  Linear weights_proj;        // [index_n_heads, D]
  Linear wk;                  // [index_head_dim, head_dim]; kv sources only, else empty
  std::vector<float> k_norm;  // [index_head_dim]; kv sources only
};

struct AttentionWeights {
  std::vector<float> sink;     // [n_heads]
  Linear wq_a;                 // [q_lora_rank, D]
  std::vector<float> q_norm;   // [q_lora_rank]
  Linear wq_b;                 // [n_heads*head_dim, q_lora_rank]
  Linear wkv;                  // [head_dim, D]
  std::vector<float> kv_norm;  // [head_dim]
  std::vector<Linear> wo_a;    // o_groups x [o_lora_rank, n_heads/o_groups*head_dim]
  Linear wo_b;                 // [D, o_groups*o_lora_rank]
  std::optional<CompressorWeights> compressor;
  std::optional<IndexerWeights> indexer;
};

struct ExpertWeights {
  Linear w1;  // [d_ff, D]  gate
  Linear w3;  // [d_ff, D]  up
  Linear w2;  // [D, d_ff]  down
};

struct MoeWeights {
  Linear gate;                         // [E, D]
  std::vector<float> bias;             // [E], selection only
  std::vector<float> bias_vl;          // [E], image tokens; empty when the pack lacks it
  std::vector<ExpertWeights> experts;  // E
  ExpertWeights shared;
};

struct EngramWeights {
  EngramTable table;            // mapped, not loaded
  Linear wkv;                   // [(HC+1)*D, n_columns*head_dim]: HC keys, one value
  std::vector<float> q_weight;  // [HC, D]
  std::vector<float> k_weight;  // [HC, D]
};

// A backbone layer, or a drafter stage (no Engram, no compressor, no indexer).
struct BlockWeights {
  std::vector<float> attn_norm;  // [D]
  std::vector<float> ffn_norm;   // [D]
  MixWeights hc_attn;
  MixWeights hc_ffn;
  AttentionWeights attn;
  MoeWeights moe;
  std::optional<EngramWeights> engram;
};

struct GlobalWeights {
  ConstView embed;          // [V, D]:BF16, mapped
  std::vector<float> norm;  // [D]
  Linear head;              // [V, D]
};

struct DrafterGlobals {
  Linear main_proj;              // [D, n_taps*D]
  std::vector<float> main_norm;  // [D]
  std::vector<float> norm;       // [D]
  ConstView markov_embed;        // [V, markov_rank]:BF16, mapped
  Linear markov_head;            // [V, markov_rank]
  Linear confidence;             // [1, D + markov_rank]
};

struct LoadOptions {
  std::string engram_dir;                                  // another folder that holds the Engram shards; empty: none
  WeightResidency residency = WeightResidency::kUnpacked;        // routed experts
  WeightResidency dense_residency = WeightResidency::kUnpacked;  // other matrices a quantizer may replace; small ones are unpacked
  Products products = Products::kExact;                    // of EXL3 matrices with the mul1 codebook
  // Token map for the Engram hash; empty: built from <dir>/tokenizer.json.
  std::vector<int32_t> engram_token_map;
};

// Difference between what a config needs and what the files hold.
struct Coverage {
  std::vector<std::string> missing;     // needed and absent
  std::vector<std::string> unexpected;  // present, neither needed nor ignorable
  std::vector<std::string> notes;       // absent but optional, duplicates that are ignored
};

// Where the matrix `spec` of a block lives in its weights (a quantizer replaces it there).
// The expert and group lists and the optional parts must exist.
Linear& matrix_place(BlockWeights& weights, const MatrixSpec& spec);

// Reads blocks of one model folder. Threads: const methods may be called concurrently with different pools.
class WeightLoader {
 public:
  // Opens config, index and (when the network has Engram) the token map. Runs the coverage check on names, types and
  // shapes. Errors: not_found for a missing folder, file or tensor; data_loss for wrong type, shape or unexpected
  // tensors; messages name the file, what was expected and what was found.
  static Result<WeightLoader> open(const std::string& dir, const LoadOptions& options = {});
  ~WeightLoader();
  WeightLoader(WeightLoader&&) noexcept;
  WeightLoader& operator=(WeightLoader&&) noexcept;

  const std::string& dir() const;
  const Config& config() const;
  const TensorIndex& index() const;
  const Coverage& coverage() const;
  const std::vector<EngramHash>& engram_hashes() const;
  const std::vector<int32_t>& engram_token_map() const;  // class per token id; empty without Engram

  // `block`: backbone layer, or n_layers + stage.
  Result<BlockWeights> load_block(ThreadPool& pool, int block) const;
  Result<GlobalWeights> load_globals(ThreadPool& pool) const;
  Result<DrafterGlobals> load_drafter_globals(ThreadPool& pool) const;
  // Keeps the mapped files alive; views in loaded weights (embed, Engram tables, stored experts) point into them.
  std::shared_ptr<const void> files() const;
  // One matrix by its spec (names.h), for callers that stream matrices.
  Result<Linear> load_matrix(const MatrixSpec& spec) const;

 private:
  struct Impl;
  explicit WeightLoader(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace espalier
