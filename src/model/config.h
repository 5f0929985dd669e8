// The model's dimensions, schedules and constants, all read from a checkpoint's config.json; nothing here is a constant
// of the release, so the launch and the 1017 snapshot (and small models of the same kind) use the same code.
//
// parse_config accepts the released layout (root + `text_config` + `quantization_config`) and the flat file with the
// vendor's own keys (`inference/config.json`). A key that is missing, has the wrong type, a value this program does not
// implement or a length that does not fit another key is refused by name. Source: model.md section 1;
// docs/formats/checkpoint.md.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace espalier {

struct YarnConfig {
  double factor = 1;
  double beta_fast = 32;
  double beta_slow = 1;
  int64_t original_positions = 0;
};

struct EngramConfig {
  std::vector<int> layers;      // ascending; empty: no Engram
  std::vector<int64_t> n_rows;  // table rows per Engram layer = sum of its primes
  int64_t max_ngram = 0;        // n-grams of 2..max_ngram tokens
  int64_t vocab = 0;            // start of the prime search
  int64_t n_heads = 0;
  int64_t head_dim = 0;
  int32_t pad_token_id = 2;
  int64_t n_classes = 0;  // classes of the compressed token map

  int64_t n_columns() const { return layers.empty() ? 0 : (max_ngram - 1) * n_heads; }
  int64_t d_concat() const { return n_columns() * head_dim; }
};

struct DrafterConfig {
  int n_stages = 0;  // 0: no drafter
  int64_t block_size = 0;
  int32_t noise_token_id = 0;
  std::vector<int> target_layers;  // taps: mean over the copies of the stream entering these layers
  int64_t markov_rank = 0;
  int64_t n_experts = 0;
  int64_t n_active = 0;
};

struct Config {
  int64_t vocab = 0;
  int64_t d_model = 0;
  int64_t d_ff = 0;  // width of one routed or shared expert
  int n_layers = 0;
  int64_t n_heads = 0;
  int64_t head_dim = 0;
  int64_t rope_dim = 0;  // the last rope_dim channels of a head rotate
  int64_t q_lora_rank = 0;
  int64_t o_lora_rank = 0;  // per group
  int64_t o_groups = 0;
  double swiglu_limit = 0;
  double rms_norm_eps = 0;
  int64_t max_positions = 0;
  double rope_theta = 0;           // window-only layers and the drafter
  double compress_rope_theta = 0;  // layers with a compressed cache, together with YaRN
  YarnConfig yarn;

  int64_t n_experts = 0;
  int64_t n_active = 0;
  double routed_scale = 1;
  double gate_temp = 1;

  int64_t window = 0;
  std::vector<int> compress_ratios;  // [n_layers + n_stages]; 0: window only
  std::vector<int> kv_sources;       // layers that build compressed KV and index keys
  std::vector<int> index_sources;    // layers that select entries; contains kv_sources
  int64_t index_n_heads = 0;
  int64_t index_head_dim = 0;
  int64_t index_topk = 0;
  int candidate_source = -1;  // -1: no candidate pruning
  int64_t candidate_topk_blocks = 0;
  int64_t candidate_block_size = 0;

  int64_t n_streams = 0;  // residual copies (hc_mult)
  int sinkhorn_iters = 0;
  double hc_eps = 0;

  EngramConfig engram;
  DrafterConfig drafter;

  int32_t bos_token_id = 0;
  int32_t eos_token_id = 1;
  int32_t pad_token_id = 2;
  int32_t image_token_id = -1;  // -1: none
  bool has_vision = false;

  int64_t fp8_block_rows = 32;
  int64_t fp8_block_cols = 32;

  // Ratio of backbone layer L (0..n_layers-1) or drafter stage k (n_layers + k).
  int ratio(int layer) const { return compress_ratios[static_cast<size_t>(layer)]; }
  bool is_kv_source(int layer) const;
  bool is_index_source(int layer) const;
  // The layer whose compressed KV `layer` reads: the largest kv source <= layer, or -1 for a window-only layer.
  int kv_source_of(int layer) const;
  // The layer whose selected entries `layer` uses, or -1 for a window-only layer.
  int index_source_of(int layer) const;
  // True for index sources above the candidate source.
  bool applies_candidates(int layer) const;
  // Position in engram.layers, or -1.
  int engram_slot(int layer) const;
  // Number of mHC coefficients per token: pre, post and comb, n_streams * (2 + n_streams).
  int64_t n_mix() const { return n_streams * (2 + n_streams); }
};

// `name` is the file's name for messages. Errors: data_loss for broken JSON; invalid values, lengths and missing keys
// are data_loss too, naming the key, what was expected and what was found; unimplemented for a value of the family that
// this program does not run (for example another scoring function). Threads: pure. Any input terminates without
// crashing (fuzz target tests/fuzz/config_fuzz.cpp).
Result<Config> parse_config(std::string_view json_text, std::string_view name);

// Reads `<dir>/config.json`.
Result<Config> load_config(const std::string& dir);

}  // namespace espalier
