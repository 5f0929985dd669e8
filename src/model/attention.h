// Attention of one block (CSA2): parts that backbone layers and drafter stages share, and the backbone's own attention
// with its window, compressed entries and index selection. Internal to model/. Source: model.md section 5.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/forward.h"

namespace espalier {

// Rotation of one block at given positions.
struct Rotation {
  std::vector<float> frequencies;  // [rope_dim/2]; YaRN on the compressed base for ratio > 0
  std::vector<int64_t> positions;  // [n_rows]
};
Rotation make_rotation(const Config& config, int block, int64_t start, int64_t n_rows);

// Rotates x [n_rows, n_heads, dim] at the rotation's positions; bf16 afterwards in vendor numerics.
void rotate(const CallContext& context, const Rotation& rotation, int64_t n_heads, int64_t dim, bool is_inverse,
            float* x);

struct Queries {
  std::vector<float> qr;  // [n_rows, q_lora_rank], normalised; shared with the indexer
  std::vector<float> q;   // [n_rows, n_heads, head_dim], rotated
};
Queries make_queries(const CallContext& context, const AttentionWeights& w, const std::string& prefix,
                     const Rotation& rotation, const float* x, int64_t n_rows);

// Window keys [n_rows, head_dim] of x: projected, normalised, rotated, in the cache format of the numerics.
std::vector<float> make_window_keys(const CallContext& context, const AttentionWeights& w, const std::string& prefix,
                                    const Rotation& rotation, const float* x, int64_t n_rows);

// o [n_rows, n_heads, head_dim] (changed in place: un-rotated) -> y [n_rows, D] through the grouped output projection.
void project_output(const CallContext& context, const AttentionWeights& w, const std::string& prefix,
                    const Rotation& rotation, float* o, int64_t n_rows, float* y);

// Attention core over lists of key rows: keys[begin[t] .. begin[t+1]) for row t.
struct KeyLists {
  std::vector<const float*> keys;
  std::vector<int64_t> begin{0};
};
std::vector<float> attend(const CallContext& context, const AttentionWeights& w, const std::vector<float>& q,
                          const KeyLists& lists);

// Attention of backbone layer `layer` for the call's rows: x, y [n_rows, D]. Appends to the layer's caches in `state`,
// and replaces stream.selected (and candidates) when the layer is an index source.
void layer_attention(const CallContext& context, const AttentionWeights& w, int layer, SequenceState& state,
                     StreamState& stream, const float* x, float* y);

// --- compression.cpp: the kv source's and index source's work inside layer_attention ---

// New compressed entries and index keys of a kv source.
void compress(const CallContext& context, const AttentionWeights& w, int layer, SequenceState& state,
              const StreamState& stream, const float* x);
// Selected entries (and candidate blocks) of an index source.
void select_entries(const CallContext& context, const AttentionWeights& w, int layer, const SequenceState& state,
                    StreamState& stream, const float* x, const std::vector<float>& qr, const Rotation& rotation);

}  // namespace espalier
