#include <algorithm>
#include <cmath>

#include "model/attention.h"
#include "model/project.h"
#include "ops/compress_group.h"
#include "ops/cpu/kernels.h"  // kPanelWidth
#include "ops/fake_quant.h"
#include "ops/index_scores.h"
#include "ops/select.h"

namespace espalier {
namespace {

// Latents [n_new, head_dim] of the groups that end inside this call, before rotation.
std::vector<float> make_latents(const CallContext& context, const CompressorWeights& w, const std::string& prefix,
                                int64_t ratio, CompressedCache& cache, const StreamState& stream, const float* x) {
  const int64_t dim = context.config.head_dim;
  const int64_t n_rows = stream.n_rows();
  const int64_t start = stream.start;
  if (ratio == 1) {
    std::vector<float> latents = project(context, w.wkv, prefix + "attn.compressor.wkv", x, n_rows, Rounding::kBf16);
    normalise(context, latents.data(), w.norm, n_rows, latents.data());
    return latents;
  }
  const std::vector<float> kv = project(context, w.wkv, prefix + "attn.compressor.wkv", x, n_rows, Rounding::kNone);
  const std::vector<float> gate =
      project(context, w.wgate, prefix + "attn.compressor.wgate", x, n_rows, Rounding::kNone);
  const int64_t first = start / ratio;
  const int64_t n_new = (start + n_rows) / ratio - first;
  std::vector<const float*> kv_rows;
  std::vector<const float*> gate_rows;
  for (int64_t p = first * ratio; p < (first + n_new) * ratio; ++p) {
    const int64_t slot = p % cache.n_group_slots * dim;
    kv_rows.push_back(p < start ? cache.group_kv.data() + slot : kv.data() + (p - start) * dim);
    gate_rows.push_back(p < start ? cache.group_gate.data() + slot : gate.data() + (p - start) * dim);
  }
  std::vector<float> latents(static_cast<size_t>(n_new * dim));
  ops::compress_group(context.pool, {kv_rows.data(), gate_rows.data(), latents.data(), n_new, ratio, dim});
  round_if_vendor(context, latents.data(), n_new * dim);
  normalise(context, latents.data(), w.norm, n_new, latents.data());
  for (int64_t t = std::max<int64_t>(0, n_rows - cache.n_group_slots); t < n_rows; ++t) {
    const int64_t slot = (start + t) % cache.n_group_slots * dim;
    std::copy_n(kv.data() + t * dim, dim, cache.group_kv.data() + slot);
    std::copy_n(gate.data() + t * dim, dim, cache.group_gate.data() + slot);
  }
  return latents;
}

}  // namespace

void compress(const CallContext& context, const AttentionWeights& w, int layer, SequenceState& state,
              const StreamState& stream, const float* x) {
  const Config& c = context.config;
  const int64_t ratio = c.ratio(layer);
  const std::string prefix = block_prefix(c, layer);
  CompressedCache& cache = state.compressed[static_cast<size_t>(layer)];
  std::vector<float> latents = make_latents(context, *w.compressor, prefix, ratio, cache, stream, x);
  const int64_t n_new = static_cast<int64_t>(latents.size()) / c.head_dim;
  if (n_new == 0) return;
  const int64_t first = stream.start / ratio;
  const int64_t n_entries = first + n_new;
  Rotation rotation = make_rotation(c, layer, 0, n_new);
  for (int64_t j = 0; j < n_new; ++j) rotation.positions[static_cast<size_t>(j)] = (first + j) * ratio;

  // Index keys come from the latent before its rotation.
  std::vector<float> keys =
      project(context, w.indexer->wk, prefix + "attn.indexer.wk", latents.data(), n_new, Rounding::kBf16);
  normalise(context, keys.data(), w.indexer->k_norm, n_new, keys.data());
  rotate(context, rotation, 1, c.index_head_dim, false, keys.data());
  rotate(context, rotation, 1, c.head_dim, false, latents.data());
  if (context.numerics != Numerics::kFull) {
    ops::fake_quant(context.pool, {keys.data(), n_new, c.index_head_dim, ops::FakeQuantFormat::kFp4});
    ops::fake_quant(context.pool, {latents.data(), n_new, c.head_dim, ops::FakeQuantFormat::kKv4});
  }
  const int64_t n_panels = (n_entries + ops::kPanelWidth - 1) / ops::kPanelWidth;
  const size_t panel_floats = static_cast<size_t>(n_panels * ops::kPanelWidth * c.index_head_dim);
  if (cache.index_keys.size() < panel_floats) cache.index_keys.resize(panel_floats, 0.0f);
  if (cache.kv.size() < static_cast<size_t>(n_entries * c.head_dim))
    cache.kv.resize(static_cast<size_t>(n_entries * c.head_dim));
  for (int64_t j = 0; j < n_new; ++j) {
    ops::set_index_key(cache.index_keys.data(), c.index_head_dim, first + j, keys.data() + j * c.index_head_dim);
    std::copy_n(latents.data() + j * c.head_dim, c.head_dim, cache.kv.data() + (first + j) * c.head_dim);
  }
}

void select_entries(const CallContext& context, const AttentionWeights& w, int layer, const SequenceState& state,
                    StreamState& stream, const float* x, const std::vector<float>& qr, const Rotation& rotation) {
  const Config& c = context.config;
  const int64_t n_rows = stream.n_rows();
  const int64_t ratio = c.ratio(layer);
  const std::string prefix = block_prefix(c, layer);
  const CompressedCache& cache = state.compressed[static_cast<size_t>(c.kv_source_of(layer))];

  std::vector<float> queries =
      project(context, w.indexer->wq_b, prefix + "attn.indexer.wq_b", qr.data(), n_rows, Rounding::kActQuant);
  rotate(context, rotation, c.index_n_heads, c.index_head_dim, false, queries.data());
  if (context.numerics != Numerics::kFull) {
    ops::fake_quant(context.pool,
                    {queries.data(), n_rows * c.index_n_heads, c.index_head_dim, ops::FakeQuantFormat::kFp4});
  }
  std::vector<float> weights = project(context, w.indexer->weights_proj, "", x, n_rows, Rounding::kBf16);
  const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(c.index_head_dim)) /
                                         std::sqrt(static_cast<double>(c.index_n_heads)));
  for (float& v : weights) v *= scale;
  round_if_vendor(context, weights.data(), static_cast<int64_t>(weights.size()));

  std::vector<int64_t> n_visible(static_cast<size_t>(n_rows));
  std::vector<int64_t> begin(static_cast<size_t>(n_rows + 1), 0);
  for (int64_t t = 0; t < n_rows; ++t) {
    n_visible[static_cast<size_t>(t)] = (stream.start + t + 1) / ratio;
    begin[static_cast<size_t>(t + 1)] = begin[static_cast<size_t>(t)] + n_visible[static_cast<size_t>(t)];
  }
  std::vector<float> scores(static_cast<size_t>(begin.back()));
  ops::IndexScoresParams p;
  p.queries = queries.data();
  p.weights = weights.data();
  p.key_panels = cache.index_keys.data();
  p.n_visible = n_visible.data();
  p.out_begin = begin.data();
  p.out = scores.data();
  p.n_rows = n_rows;
  p.n_heads = c.index_n_heads;
  p.dim = c.index_head_dim;
  p.round_bf16 = context.numerics == Numerics::kVendor;
  ops::index_scores(context.pool, p);
  if (context.observer != nullptr)
    context.observer->index_scores(layer, scores.data(), begin.data(), n_visible.data(), n_rows);

  if (layer == c.candidate_source) {
    stream.n_candidate_blocks = (n_visible.back() + c.candidate_block_size - 1) / c.candidate_block_size;
    stream.candidates.assign(static_cast<size_t>(n_rows * stream.n_candidate_blocks), 0);
    for (int64_t t = 0; t < n_rows; ++t) {
      ops::select_blocks(scores.data() + begin[static_cast<size_t>(t)], n_visible[static_cast<size_t>(t)],
                         c.candidate_topk_blocks, c.candidate_block_size,
                         stream.candidates.data() + t * stream.n_candidate_blocks, stream.n_candidate_blocks);
    }
  }
  const bool is_masked = c.applies_candidates(layer);
  stream.selected.begin.assign(1, 0);
  stream.selected.entries.clear();
  for (int64_t t = 0; t < n_rows; ++t) {
    ops::select_top_k(scores.data() + begin[static_cast<size_t>(t)], n_visible[static_cast<size_t>(t)], c.index_topk,
                      is_masked ? stream.candidates.data() + t * stream.n_candidate_blocks : nullptr,
                      c.candidate_block_size, stream.selected.entries);
    stream.selected.begin.push_back(static_cast<int64_t>(stream.selected.entries.size()));
  }
}

}  // namespace espalier
