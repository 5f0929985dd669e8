#include <algorithm>
#include <cmath>

#include "model/cuda/run.h"
#include "ops/cuda/attention.h"
#include "ops/cuda/attention_fast.h"
#include "ops/cuda/rows.h"
#include "ops/cuda/selection.h"

namespace espalier::cuda {

Result<float*> Run::make_reduced_queries(const DeviceAttention& w, const float* x, int64_t n_rows) {
  stream_.begin_part("queries");
  ASSIGN_OR_RETURN(float* qr, project(w.wq_a, x, n_rows, Rounding::kActQuant));
  RETURN_IF_ERROR(normalise(qr, w.q_norm, w.wq_a.out, n_rows, qr));
  return qr;
}

Result<float*> Run::make_full_queries(const DeviceAttention& w, const int64_t* positions, const float* qr, int64_t n_rows) {
  stream_.begin_part("queries");
  ASSIGN_OR_RETURN(float* q, project(w.wq_b, qr, n_rows, Rounding::kActQuant));
  RETURN_IF_ERROR(rotate(w, positions, n_rows, config_.n_heads, config_.head_dim, false, q));
  return q;
}

Result<float*> Run::make_window_keys(const DeviceAttention& w, const int64_t* positions, const float* x, int64_t n_rows) {
  const int64_t dim = config_.head_dim;
  stream_.begin_part("window keys");
  ASSIGN_OR_RETURN(float* kv, project(w.wkv, x, n_rows, Rounding::kActQuant));
  RETURN_IF_ERROR(normalise(kv, w.kv_norm, dim, n_rows, kv));
  RETURN_IF_ERROR(rotate(w, positions, n_rows, 1, dim, false, kv));
  if (numerics_ != Numerics::kFull) RETURN_IF_ERROR(ops::cuda::fake_quant(stream_, {kv, n_rows, dim, ops::FakeQuantFormat::kAct}));
  return kv;
}

Result<float*> Run::attend(const DeviceAttention& w, const float* q, const float* const* keys, const int64_t* begin, int64_t n_places,
                           int64_t n_rows) {
  ops::AttentionParams p;
  p.q = q;
  p.keys = keys;
  p.key_begin = begin;
  p.sink = w.sink;
  ASSIGN_OR_RETURN(p.out, workspace_.take<float>(n_rows * config_.n_heads * config_.head_dim));
  p.n_rows = n_rows;
  p.n_heads = config_.n_heads;
  p.head_dim = config_.head_dim;
  p.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(config_.head_dim)));
  p.is_online = numerics_ == Numerics::kVendor;
  if (order_ == ops::cuda::Order::kFast && !p.is_online && ops::cuda::can_attend_fast(p)) {
    ASSIGN_OR_RETURN(float* parts, workspace_.take<float>(ops::cuda::attention_parts_size(p, n_places)));
    RETURN_IF_ERROR(ops::cuda::attention_fast(stream_, p, n_places, parts));
  } else {
    RETURN_IF_ERROR(ops::cuda::attention(stream_, p, n_places));
  }
  RETURN_IF_ERROR(round_if_vendor(p.out, n_rows * config_.n_heads * config_.head_dim));
  return p.out;
}

// The groups are independent: they are spread over the branches.
Status Run::project_groups(const DeviceAttention& w, const float* x, int64_t x_group, int64_t x_stride, int64_t n_rows, float* y, int64_t y_group,
                           int64_t y_stride) {
  RETURN_IF_ERROR(tools_.branches.fork(stream_, PassTools::kBranches));
  for (int lane = 0; lane < PassTools::kBranches + 1; ++lane) {
    Run run = lane == 0 ? *this : on_branch(lane - 1);
    for (int64_t g = lane; g < config_.o_groups; g += PassTools::kBranches + 1) {
      RETURN_IF_ERROR(run.project(w.wo_a[static_cast<size_t>(g)], x + g * x_group, x_stride, n_rows, Rounding::kBf16, y + g * y_group, y_stride));
    }
  }
  for (int i = 0; i < PassTools::kBranches; ++i) RETURN_IF_ERROR(tools_.branches.join(i, stream_));
  return ok_status();
}

Status Run::project_output(const DeviceAttention& w, const int64_t* positions, float* o, int64_t n_rows, float* y) {
  const Config& c = config_;
  stream_.begin_part("attention out");
  RETURN_IF_ERROR(rotate(w, positions, n_rows, c.n_heads, c.head_dim, true, o));
  const int64_t width = c.n_heads * c.head_dim, group_in = c.n_heads / c.o_groups * c.head_dim, concat = c.o_groups * c.o_lora_rank;
  ASSIGN_OR_RETURN(float* parts, workspace_.take<float>(n_rows * concat));
  const bool needs_rows_together = std::any_of(w.wo_a.begin(), w.wo_a.end(), [&](const DeviceWeight& group) { return is_in_integers(group); });
  if (needs_rows_together) {  // groups become the outer dimension, and rows again
    float *by_group = o, *out = parts;
    if (n_rows > 1) {
      ASSIGN_OR_RETURN(by_group, workspace_.take<float>(n_rows * width));
      ASSIGN_OR_RETURN(out, workspace_.take<float>(n_rows * concat));
      RETURN_IF_ERROR(swap_rows(stream_, o, n_rows, c.o_groups, group_in, by_group));
    }
    RETURN_IF_ERROR(project_groups(w, by_group, n_rows * group_in, group_in, n_rows, out, n_rows * c.o_lora_rank, c.o_lora_rank));
    if (n_rows > 1) RETURN_IF_ERROR(swap_rows(stream_, out, c.o_groups, n_rows, c.o_lora_rank, parts));
    return project(w.wo_b, parts, concat, n_rows, Rounding::kActQuant, y, c.d_model);
  }
  RETURN_IF_ERROR(project_groups(w, o, group_in, width, n_rows, parts, c.o_lora_rank, concat));
  return project(w.wo_b, parts, concat, n_rows, Rounding::kActQuant, y, c.d_model);
}

Status Run::layer_attention(const DeviceAttention& w, int layer, SequenceCache& cache, DeviceRows& rows, const float* x, float* y) {
  const Config& c = config_;
  const int64_t n = rows.n;
  const bool selects = c.is_index_source(layer);
  KeyListParams p;
  p.n_rows = n;
  p.window_size = c.window;
  // The vendor's first list has as many window places as rows; empty ones would shift the blocks of the online softmax.
  p.n_window = numerics_ == Numerics::kVendor && rows.is_first ? std::min(c.window, n) : c.window;
  if (c.ratio(layer) > 0) {
    p.entries = cache.compressed[static_cast<size_t>(c.kv_source_of(layer))].kv.data();
    p.selected = rows.selected;
    p.selected_stride = rows.selected_stride;
    p.n_selected = rows.n_selected;
  }
  p.n_places = p.n_window + p.selected_stride;
  ASSIGN_OR_RETURN(p.keys, workspace_.take<const float*>(n * p.n_places));
  ASSIGN_OR_RETURN(p.begin, workspace_.take<int64_t>(n + 1));

  // Beside the queries: window keys (0), the compressor (1), the lists or, with what the compressor has made, the selection (2).
  RETURN_IF_ERROR(tools_.branches.fork(stream_, PassTools::kBranches));
  ASSIGN_OR_RETURN(const float* own, on_branch(0).make_window_keys(w, rows.positions, x, n));
  p.window = {own, cache.window(layer), rows.start, cache.n_slots, c.head_dim};
  if (c.is_kv_source(layer)) RETURN_IF_ERROR(on_branch(1).compress(w, layer, cache, rows, x));
  device::Stream& lists = tools_.branches.stream(2);
  float* q = nullptr;
  if (selects) {
    ASSIGN_OR_RETURN(const IndexInputs inputs, on_branch(1).index_inputs(w, layer, cache, rows, x));
    ASSIGN_OR_RETURN(const float* qr, make_reduced_queries(w, x, n));
    RETURN_IF_ERROR(tools_.branches.fork(stream_, 1, 2));
    RETURN_IF_ERROR(tools_.branches.join(1, lists));
    RETURN_IF_ERROR(on_branch(2).select_entries(w, layer, cache, rows, qr, inputs));
    RETURN_IF_ERROR(make_key_lists(lists, p));
    ASSIGN_OR_RETURN(q, make_full_queries(w, rows.positions, qr, n));
  } else {
    RETURN_IF_ERROR(make_key_lists(lists, p));
    ASSIGN_OR_RETURN(const float* qr, make_reduced_queries(w, x, n));
    ASSIGN_OR_RETURN(q, make_full_queries(w, rows.positions, qr, n));
  }
  for (int i = 0; i < PassTools::kBranches; ++i) RETURN_IF_ERROR(tools_.branches.join(i, stream_));
  stream_.begin_part("attention");
  ASSIGN_OR_RETURN(float* o, attend(w, q, p.keys, p.begin, p.n_places, n));
  // The ring may be written now; the branch is joined with those of the output's groups.
  RETURN_IF_ERROR(tools_.branches.fork(stream_, 1));
  RETURN_IF_ERROR(write_ring(tools_.branches.stream(0), own, rows.start, n, cache.n_slots, c.head_dim, cache.window(layer)));
  return project_output(w, rows.positions, o, n, y);
}

// Latents [n_new, head_dim] of the groups that end inside this call, before rotation.
Result<float*> Run::make_latents(const DeviceCompressor& w, int64_t ratio, CompressedRows& cache, const DeviceRows& rows, const float* x,
                                 int64_t n_new) {
  const int64_t dim = config_.head_dim;
  if (ratio == 1) {
    ASSIGN_OR_RETURN(float* latents, project(w.wkv, x, rows.n, Rounding::kBf16));
    RETURN_IF_ERROR(normalise(latents, w.norm, dim, rows.n, latents));
    return latents;
  }
  ASSIGN_OR_RETURN(const float* kv, project(w.wkv, x, rows.n, Rounding::kNone));
  ASSIGN_OR_RETURN(const float* gate, project(w.wgate, x, rows.n, Rounding::kNone));
  ASSIGN_OR_RETURN(float* latents, workspace_.take<float>(n_new * dim));
  if (n_new > 0) {
    ASSIGN_OR_RETURN(const float** kv_rows, workspace_.take<const float*>(n_new * ratio));
    ASSIGN_OR_RETURN(const float** gate_rows, workspace_.take<const float*>(n_new * ratio));
    RETURN_IF_ERROR(point_to_rows(stream_, {kv, cache.group_kv.data(), rows.start, cache.n_group_slots, dim}, ratio, n_new * ratio, kv_rows));
    RETURN_IF_ERROR(point_to_rows(stream_, {gate, cache.group_gate.data(), rows.start, cache.n_group_slots, dim}, ratio, n_new * ratio, gate_rows));
    RETURN_IF_ERROR(ops::cuda::compress_group(stream_, {kv_rows, gate_rows, latents, n_new, ratio, dim}));
    RETURN_IF_ERROR(round_if_vendor(latents, n_new * dim));
    RETURN_IF_ERROR(normalise(latents, w.norm, dim, n_new, latents));
  }
  RETURN_IF_ERROR(write_ring(stream_, kv, rows.start, rows.n, cache.n_group_slots, dim, cache.group_kv.data()));
  RETURN_IF_ERROR(write_ring(stream_, gate, rows.start, rows.n, cache.n_group_slots, dim, cache.group_gate.data()));
  return latents;
}

Status Run::compress(const DeviceAttention& w, int layer, SequenceCache& cache, const DeviceRows& rows, const float* x) {
  const Config& c = config_;
  const int64_t ratio = c.ratio(layer), n_new = (rows.phase + rows.n) / ratio - rows.phase / ratio;
  stream_.begin_part("compressor");
  CompressedRows& to = cache.compressed[static_cast<size_t>(layer)];
  ASSIGN_OR_RETURN(float* latents, make_latents(*w.compressor, ratio, to, rows, x, n_new));
  if (n_new == 0) return ok_status();
  ASSIGN_OR_RETURN(int64_t* positions, workspace_.take<int64_t>(n_new));
  RETURN_IF_ERROR(fill_positions(stream_, rows.start, ratio, n_new, positions));
  // Index keys come from the latent before its rotation.
  ASSIGN_OR_RETURN(float* keys, project(w.indexer->wk, latents, n_new, Rounding::kBf16));
  RETURN_IF_ERROR(normalise(keys, w.indexer->k_norm, c.index_head_dim, n_new, keys));
  RETURN_IF_ERROR(rotate(w, positions, n_new, 1, c.index_head_dim, false, keys));
  RETURN_IF_ERROR(rotate(w, positions, n_new, 1, c.head_dim, false, latents));
  if (numerics_ != Numerics::kFull) {
    RETURN_IF_ERROR(ops::cuda::fake_quant(stream_, {keys, n_new, c.index_head_dim, ops::FakeQuantFormat::kFp4}));
    RETURN_IF_ERROR(ops::cuda::fake_quant(stream_, {latents, n_new, c.head_dim, ops::FakeQuantFormat::kKv4}));
  }
  RETURN_IF_ERROR(ops::cuda::set_index_keys(stream_, keys, n_new, c.index_head_dim, rows.start, ratio, to.index_keys.data()));
  return write_entries(stream_, latents, rows.start, ratio, n_new, c.head_dim, to.kv.data());
}

Result<Run::IndexInputs> Run::index_inputs(const DeviceAttention& w, int layer, const SequenceCache& cache, const DeviceRows& rows, const float* x) {
  const Config& c = config_;
  const int64_t n = rows.n, max_visible = cache.compressed[static_cast<size_t>(c.kv_source_of(layer))].capacity;
  IndexInputs out;
  stream_.begin_part("index");
  ASSIGN_OR_RETURN(out.weights, project(w.indexer->weights_proj, x, n, Rounding::kBf16));
  const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(c.index_head_dim)) /
                                          std::sqrt(static_cast<double>(c.index_n_heads)));
  RETURN_IF_ERROR(scale(stream_, out.weights, n * c.index_n_heads, factor));
  RETURN_IF_ERROR(round_if_vendor(out.weights, n * c.index_n_heads));
  ASSIGN_OR_RETURN(out.n_visible, workspace_.take<int64_t>(n));
  ASSIGN_OR_RETURN(out.begin, workspace_.take<int64_t>(n));
  RETURN_IF_ERROR(fill_visible(stream_, rows.start, c.ratio(layer), max_visible, n, out.n_visible, out.begin));
  return out;
}

Status Run::select_entries(const DeviceAttention& w, int layer, SequenceCache& cache, DeviceRows& rows, const float* qr, const IndexInputs& inputs) {
  const Config& c = config_;
  const int64_t n = rows.n, *n_visible = inputs.n_visible, *begin = inputs.begin;
  const CompressedRows& from = cache.compressed[static_cast<size_t>(c.kv_source_of(layer))];
  const int64_t max_visible = from.capacity;  // at least what any row sees
  stream_.begin_part("index");
  ASSIGN_OR_RETURN(float* queries, project(w.indexer->wq_b, qr, n, Rounding::kActQuant));
  RETURN_IF_ERROR(rotate(w, rows.positions, n, c.index_n_heads, c.index_head_dim, false, queries));
  if (numerics_ != Numerics::kFull) {
    RETURN_IF_ERROR(ops::cuda::fake_quant(stream_, {queries, n * c.index_n_heads, c.index_head_dim, ops::FakeQuantFormat::kFp4}));
  }
  ASSIGN_OR_RETURN(float* scores, workspace_.take<float>(n * max_visible));
  ops::IndexScoresParams s;
  s.queries = queries;
  s.weights = inputs.weights;
  s.key_panels = from.index_keys.data();
  s.n_visible = n_visible;
  s.out_begin = begin;
  s.out = scores;
  s.n_rows = n;
  s.n_heads = c.index_n_heads;
  s.dim = c.index_head_dim;
  s.round_bf16 = numerics_ == Numerics::kVendor;
  RETURN_IF_ERROR(ops::cuda::index_scores(stream_, s, max_visible));

  if (layer == c.candidate_source) {
    rows.n_candidate_blocks = (max_visible + c.candidate_block_size - 1) / c.candidate_block_size;
    ops::cuda::SelectBlocksParams b;
    b.scores = scores;
    b.begin = begin;
    b.n = n_visible;
    b.k = c.candidate_topk_blocks;
    b.block_size = c.candidate_block_size;
    b.n_blocks = rows.n_candidate_blocks;
    b.mask = rows.candidates;
    ASSIGN_OR_RETURN(b.best, workspace_.take<float>(n * b.n_blocks));
    ASSIGN_OR_RETURN(b.chosen, workspace_.take<int32_t>(n * b.n_blocks));
    ASSIGN_OR_RETURN(b.lengths, workspace_.take<int64_t>(3 * n));
    b.n_rows = n;
    RETURN_IF_ERROR(ops::cuda::select_blocks(stream_, b));
  }
  ops::cuda::SelectParams k;
  k.scores = scores;
  k.begin = begin;
  k.n = n_visible;
  k.k = c.index_topk;
  if (c.applies_candidates(layer)) {
    k.allowed = rows.candidates;
    k.allowed_stride = rows.n_candidate_blocks;
  }
  k.block_size = c.candidate_block_size;
  k.entries = rows.selected;
  k.entries_stride = rows.selected_stride;
  k.n_selected = rows.n_selected;
  k.n_rows = n;
  return ops::cuda::select_top_k(stream_, k);
}

}  // namespace espalier::cuda
