#include "model/forward.h"

#include <algorithm>

#include "model/attention.h"
#include "model/block.h"
#include "model/project.h"
#include "ops/engram_gate.h"
#include "ops/mhc.h"
#include "ops/parallel.h"

namespace espalier {

Result<std::shared_ptr<const Model>> Model::load(const std::string& dir, const LoadOptions& options, ThreadPool& pool) {
  ASSIGN_OR_RETURN(const WeightLoader loader, WeightLoader::open(dir, options));
  std::shared_ptr<Model> model(new Model());
  model->config_ = loader.config();
  model->dir_ = dir;
  model->coverage_ = loader.coverage();
  model->files_ = loader.files();
  model->engram_hashes = loader.engram_hashes();
  model->engram_token_map = loader.engram_token_map();
  ASSIGN_OR_RETURN(model->globals, loader.load_globals(pool));
  for (int l = 0; l < model->config_.n_layers; ++l) {
    ASSIGN_OR_RETURN(BlockWeights block, loader.load_block(pool, l));
    model->layers.push_back(std::move(block));
  }
  for (int k = 0; k < model->config_.drafter.n_stages; ++k) {
    ASSIGN_OR_RETURN(BlockWeights block, loader.load_block(pool, model->config_.n_layers + k));
    model->stages.push_back(std::move(block));
  }
  ASSIGN_OR_RETURN(model->drafter, loader.load_drafter_globals(pool));
  return std::shared_ptr<const Model>(std::move(model));
}

Status begin_call(const CallContext& context, const GlobalWeights& globals, SequenceState& state,
                  std::span<const int32_t> ids, StreamState* stream) {
  const Config& c = context.config;
  const int64_t start = state.n_tokens();
  const int64_t n = static_cast<int64_t>(ids.size());
  if (n == 0) return invalid_argument("tokens: expected at least one id, found none");
  if (n > c.max_positions - start) {
    return resource_exhausted("tokens: expected at most " + std::to_string(c.max_positions) +
                              " positions (max_position_embeddings), found " + std::to_string(start + n) +
                              "; shorten the prompt");
  }
  const bool has_engram = !c.engram.layers.empty();
  const int64_t n_ids =
      has_engram ? std::min<int64_t>(c.vocab, static_cast<int64_t>(context.engram_token_map.size())) : c.vocab;
  for (int64_t t = 0; t < n; ++t) {
    const int32_t id = ids[static_cast<size_t>(t)];
    if (id < 0 || id >= n_ids) {
      return invalid_argument("tokens: position " + std::to_string(start + t) + ": expected an id in 0.." +
                              std::to_string(n_ids - 1) + ", found " + std::to_string(id));
    }
    if (id == c.image_token_id) {
      return invalid_argument("tokens: position " + std::to_string(start + t) + ": found the image token " +
                              std::to_string(id) + "; images are not supported, use text only");
    }
  }
  if (has_engram) {
    state.engram_history.resize(static_cast<size_t>(start));
    for (int32_t id : ids) state.engram_history.push_back(context.engram_token_map[static_cast<size_t>(id)]);
  }
  *stream = StreamState();
  stream->ids.assign(ids.begin(), ids.end());
  stream->start = start;
  embed_rows(c, globals, stream->ids.data(), n, stream->h, stream->pre);
  if (c.drafter.n_stages > 0) {
    stream->taps = Tensor(DType::kF32, {n, static_cast<int64_t>(c.drafter.target_layers.size()) * c.d_model});
  }
  return ok_status();
}

namespace {

Status run_engram(const CallContext& context, const EngramWeights& w, int layer, const SequenceState& state,
                  StreamState& stream) {
  const Config& c = context.config;
  const EngramHash& hash = context.engram_hashes[static_cast<size_t>(c.engram_slot(layer))];
  const int64_t n_rows = stream.n_rows();
  const int64_t n_columns = c.engram.n_columns();
  const int64_t width = c.engram.d_concat();
  const int32_t pad = context.engram_token_map[static_cast<size_t>(c.engram.pad_token_id)];
  std::vector<int64_t> rows(static_cast<size_t>(n_rows * n_columns));
  std::vector<float> e(static_cast<size_t>(n_rows * width));
  for (int64_t t = 0; t < n_rows; ++t) {
    int64_t* r = rows.data() + t * n_columns;
    engram_rows(hash, state.engram_history, stream.start + t, pad, c.engram.n_heads, r);
    for (int64_t i = 0; i < n_columns; ++i)
      RETURN_IF_ERROR(read_engram_row(w.table, r[i], e.data() + t * width + i * c.engram.head_dim));
  }
  if (context.observer != nullptr) context.observer->engram_table_rows(layer, rows.data(), n_rows, n_columns);
  const std::vector<float> kv =
      project(context, w.wkv, block_prefix(c, layer) + "engram.wkv", e.data(), n_rows, Rounding::kActQuant);
  ops::engram_gate(context.pool, {stream.h.f32(), kv.data(), w.q_weight.data(), w.k_weight.data(), n_rows, c.n_streams,
                                  c.d_model, c.rms_norm_eps});
  round_if_vendor(context, stream.h.f32(), n_rows * c.n_streams * c.d_model);
  if (context.observer != nullptr)
    context.observer->value(layer, "engram.out", stream.h.f32(), n_rows, c.n_streams * c.d_model);
  return ok_status();
}

// Mean over the copies of the stream entering a target layer.
void take_tap(const CallContext& context, int64_t slot, StreamState& stream) {
  const Config& c = context.config;
  const int64_t width = stream.taps.dim(1);
  for (int64_t t = 0; t < stream.n_rows(); ++t) {
    const float* h = stream.h.f32() + t * c.n_streams * c.d_model;
    float* out = stream.taps.f32() + t * width + slot * c.d_model;
    for (int64_t d = 0; d < c.d_model; ++d) {
      float sum = h[d];
      for (int64_t s = 1; s < c.n_streams; ++s) sum += h[s * c.d_model + d];
      out[d] = sum / static_cast<float>(c.n_streams);
    }
    round_if_vendor(context, out, c.d_model);
  }
}

}  // namespace

Status run_layer(const CallContext& context, const BlockWeights& weights, int layer, SequenceState& state,
                 StreamState& stream) {
  const Config& c = context.config;
  if (weights.engram) RETURN_IF_ERROR(run_engram(context, *weights.engram, layer, state, stream));
  for (size_t i = 0; i < c.drafter.target_layers.size(); ++i) {
    if (c.drafter.n_stages > 0 && c.drafter.target_layers[i] == layer)
      take_tap(context, static_cast<int64_t>(i), stream);
  }
  run_block(context, weights, layer, stream.h, stream.pre,
            [&](const float* x, float* y) { layer_attention(context, weights.attn, layer, state, stream, x, y); });
  return ok_status();
}

Tensor finish_call(const CallContext& context, const GlobalWeights& globals, SequenceState& state,
                   const StreamState& stream, bool all_logits) {
  const Config& c = context.config;
  const int64_t n_rows = all_logits ? stream.n_rows() : 1;
  const int64_t first = stream.n_rows() - n_rows;
  std::vector<float> x(static_cast<size_t>(n_rows * c.d_model));
  ops::mhc_collapse(context.pool, {stream.h.f32() + first * c.n_streams * c.d_model,
                                   stream.pre.f32() + first * c.n_streams, x.data(), n_rows, c.n_streams, c.d_model});
  round_if_vendor(context, x.data(), n_rows * c.d_model);
  normalise(context, x.data(), globals.norm, n_rows, x.data());
  if (context.observer != nullptr) context.observer->value(-1, "hidden", x.data(), n_rows, c.d_model);
  Tensor logits(DType::kF32, {n_rows, c.vocab});
  project(context, globals.head, "head", x.data(), n_rows, Rounding::kNone, logits.f32());
  state.advance(stream.n_rows());
  return logits;
}

Result<ForwardResult> forward(const Model& model, SequenceState& state, std::span<const int32_t> ids,
                              const ForwardOptions& options, ThreadPool& pool) {
  const Config& c = model.config();
  const CallContext context{c, model.engram_hashes, model.engram_token_map, options.numerics, pool, options.observer};
  const int64_t n = static_cast<int64_t>(ids.size());
  const int64_t chunk = std::max<int64_t>(1, options.chunk);
  if (n == 0) return invalid_argument("tokens: expected at least one id, found none");
  if (n > c.max_positions - state.n_tokens()) {  // refused before any chunk runs
    return resource_exhausted("tokens: expected at most " + std::to_string(c.max_positions) +
                              " positions (max_position_embeddings), found " + std::to_string(state.n_tokens() + n) +
                              "; shorten the prompt");
  }
  ForwardResult result;
  result.logits = Tensor(DType::kF32, {options.all_logits ? n : 1, c.vocab});
  if (c.drafter.n_stages > 0) {
    result.taps = Tensor(DType::kF32, {n, static_cast<int64_t>(c.drafter.target_layers.size()) * c.d_model});
  }
  for (int64_t done = 0; done < n; done += chunk) {
    const int64_t rows = std::min(chunk, n - done);
    StreamState stream;
    RETURN_IF_ERROR(begin_call(context, model.globals, state,
                               ids.subspan(static_cast<size_t>(done), static_cast<size_t>(rows)), &stream));
    for (int l = 0; l < c.n_layers; ++l)
      RETURN_IF_ERROR(run_layer(context, model.layers[static_cast<size_t>(l)], l, state, stream));
    const bool is_last = done + rows == n;
    if (options.all_logits || is_last) {
      const Tensor logits = finish_call(context, model.globals, state, stream, options.all_logits);
      std::copy_n(logits.f32(), logits.size(), result.logits.f32() + (options.all_logits ? done * c.vocab : 0));
    } else {
      state.advance(rows);
    }
    if (!result.taps.empty())
      std::copy_n(stream.taps.f32(), stream.taps.size(), result.taps.f32() + done * stream.taps.dim(1));
  }
  return result;
}

}  // namespace espalier
