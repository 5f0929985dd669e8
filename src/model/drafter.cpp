#include "model/drafter.h"

#include <algorithm>

#include "model/attention.h"
#include "model/block.h"
#include "model/project.h"
#include "ops/mhc.h"

namespace espalier {

DrafterState::DrafterState(const Config& config) {
  rings.resize(static_cast<size_t>(config.drafter.n_stages));
  for (WindowRing& ring : rings) {
    ring.head_dim = config.head_dim;
    ring.n_slots = config.window;
    ring.rows.assign(static_cast<size_t>(ring.n_slots * ring.head_dim), 0.0f);
  }
}

void DrafterState::reset(int64_t first_position) {
  first_position_ = first_position;
  n_tokens_ = first_position;
}

void draft_main_x(const CallContext& context, const DrafterGlobals& globals, const float* taps, int64_t n_rows,
                  float* main_x) {
  project(context, globals.main_proj, "mtp.0.main_proj", taps, n_rows, Rounding::kActQuant, main_x);
  normalise(context, main_x, globals.main_norm, n_rows, main_x);
}

void seed_stage(const CallContext& context, const BlockWeights& stage_weights, int stage, const float* main_x,
                int64_t n_rows, int64_t start, WindowRing& ring) {
  const Config& c = context.config;
  const int block = c.n_layers + stage;
  const Rotation rotation = make_rotation(c, block, start, n_rows);
  const std::vector<float> keys =
      make_window_keys(context, stage_weights.attn, block_prefix(c, block), rotation, main_x, n_rows);
  for (int64_t t = std::max<int64_t>(0, n_rows - ring.n_slots); t < n_rows; ++t) {
    std::copy_n(keys.data() + t * c.head_dim, c.head_dim, ring.row(start + t));
  }
}

void begin_draft(const CallContext& context, const GlobalWeights& globals, int32_t token, int64_t position,
                 DraftStream* stream) {
  const Config& c = context.config;
  stream->ids.assign(static_cast<size_t>(c.drafter.block_size), c.drafter.noise_token_id);
  stream->ids[0] = token;
  stream->start = position;
  embed_rows(c, globals, stream->ids.data(), c.drafter.block_size, stream->h, stream->pre);
}

void run_draft_stage(const CallContext& context, const BlockWeights& stage_weights, int stage, const WindowRing& ring,
                     int64_t first_position, DraftStream& stream) {
  const Config& c = context.config;
  const int block = c.n_layers + stage;
  const std::string prefix = block_prefix(c, block);
  const int64_t n_rows = static_cast<int64_t>(stream.ids.size());
  run_block(context, stage_weights, block, stream.h, stream.pre, [&](const float* x, float* y) {
    const AttentionWeights& w = stage_weights.attn;
    const Rotation rotation = make_rotation(c, block, stream.start, n_rows);
    const Queries queries = make_queries(context, w, prefix, rotation, x, n_rows);
    const std::vector<float> own = make_window_keys(context, w, prefix, rotation, x, n_rows);
    // Every row attends the same set: the ring, then the block's own rows (not causal).
    KeyLists lists;
    for (int64_t t = 0; t < n_rows; ++t) {
      for (int64_t j = std::max(first_position, stream.start - c.window); j < stream.start; ++j)
        lists.keys.push_back(ring.row(j));
      for (int64_t j = 0; j < n_rows; ++j) lists.keys.push_back(own.data() + j * c.head_dim);
      lists.begin.push_back(static_cast<int64_t>(lists.keys.size()));
    }
    std::vector<float> o = attend(context, w, queries.q, lists);
    if (context.observer != nullptr) {
      context.observer->value(block, "core.q", queries.q.data(), n_rows, c.n_heads * c.head_dim);
      context.observer->value(block, "core.o", o.data(), n_rows, c.n_heads * c.head_dim);
    }
    project_output(context, w, prefix, rotation, o.data(), n_rows, y);
  });
}

DraftResult finish_draft(const CallContext& context, const GlobalWeights& globals, const DrafterGlobals& drafter,
                         const DraftStream& stream) {
  const Config& c = context.config;
  const int64_t n_rows = static_cast<int64_t>(stream.ids.size());
  const int64_t d = c.d_model;
  const int64_t rank = c.drafter.markov_rank;
  std::vector<float> x(static_cast<size_t>(n_rows * d));
  ops::mhc_collapse(context.pool, {stream.h.f32(), stream.pre.f32(), x.data(), n_rows, c.n_streams, d});
  round_if_vendor(context, x.data(), n_rows * d);
  std::vector<float> normed(x.size());
  normalise(context, x.data(), drafter.norm, n_rows, normed.data());
  DraftResult result;
  result.logits = Tensor(DType::kF32, {n_rows, c.vocab});
  result.confidence = Tensor(DType::kF32, {n_rows});
  project(context, globals.head, "head", normed.data(), n_rows, Rounding::kNone, result.logits.f32());
  int32_t previous = stream.ids[0];
  std::vector<float> confidence_in(static_cast<size_t>(d + rank));
  std::vector<float> bias(static_cast<size_t>(c.vocab));
  for (int64_t j = 0; j < n_rows; ++j) {
    float* e = confidence_in.data() + d;
    std::copy_n(x.data() + j * d, d, confidence_in.data());
    bf16_row(drafter.markov_embed, previous, e);
    project(context, drafter.markov_head, "", e, 1, Rounding::kNone, bias.data());
    float* logits = result.logits.f32() + j * c.vocab;
    for (int64_t v = 0; v < c.vocab; ++v) logits[v] += bias[static_cast<size_t>(v)];
    project(context, drafter.confidence, "", confidence_in.data(), 1, Rounding::kNone, result.confidence.f32() + j);
    previous = static_cast<int32_t>(std::max_element(logits, logits + c.vocab) - logits);
    result.ids.push_back(previous);
  }
  return result;
}

namespace {

CallContext context_of(const Model& model, Numerics numerics, ThreadPool& pool, LayerObserver* observer) {
  return {model.config(), model.engram_hashes, model.engram_token_map, numerics, pool, observer};
}

}  // namespace

Status seed_drafter(const Model& model, DrafterState& state, const Tensor& taps, int64_t n_rows, Numerics numerics,
                    ThreadPool& pool, LayerObserver* observer) {
  const Config& c = model.config();
  if (c.drafter.n_stages == 0)
    return failed_precondition("drafter: this model has none (num_nextn_predict_layers is 0)");
  CHECK(n_rows <= taps.dim(0)) << "taps of " << taps.dim(0) << " rows, asked for " << n_rows;
  const CallContext context = context_of(model, numerics, pool, observer);
  // Only the last `window` rows can be seen again.
  const int64_t skip = std::max<int64_t>(0, n_rows - c.window);
  const int64_t n = n_rows - skip;
  std::vector<float> main_x(static_cast<size_t>(n * c.d_model));
  draft_main_x(context, model.drafter, taps.f32() + skip * taps.dim(1), n, main_x.data());
  for (int k = 0; k < c.drafter.n_stages; ++k) {
    seed_stage(context, model.stages[static_cast<size_t>(k)], k, main_x.data(), n, state.n_tokens() + skip,
               state.rings[static_cast<size_t>(k)]);
  }
  state.advance(n_rows);
  return ok_status();
}

Result<DraftResult> draft(const Model& model, const DrafterState& state, int32_t token, Numerics numerics,
                          ThreadPool& pool, LayerObserver* observer) {
  const Config& c = model.config();
  if (c.drafter.n_stages == 0)
    return failed_precondition("drafter: this model has none (num_nextn_predict_layers is 0)");
  if (state.n_tokens() == state.first_position())
    return failed_precondition("drafter: no position has been seeded yet");
  if (token < 0 || token >= c.vocab) {
    return invalid_argument("drafter: expected a token id in 0.." + std::to_string(c.vocab - 1) + ", found " +
                            std::to_string(token));
  }
  const CallContext context = context_of(model, numerics, pool, observer);
  DraftStream stream;
  begin_draft(context, model.globals, token, state.n_tokens(), &stream);
  for (int k = 0; k < c.drafter.n_stages; ++k) {
    run_draft_stage(context, model.stages[static_cast<size_t>(k)], k, state.rings[static_cast<size_t>(k)],
                    state.first_position(), stream);
  }
  return finish_draft(context, model.globals, model.drafter, stream);
}

}  // namespace espalier
