#include "model/attention.h"

#include <algorithm>
#include <cmath>

#include "model/project.h"
#include "ops/attention.h"
#include "ops/fake_quant.h"
#include "ops/rope.h"

namespace espalier {

Rotation make_rotation(const Config& config, int block, int64_t start, int64_t n_rows) {
  Rotation r;
  r.frequencies = config.ratio(block) == 0
                      ? ops::rope_frequencies(config.rope_dim, config.rope_theta)
                      : ops::yarn_frequencies(config.rope_dim, config.compress_rope_theta,
                                              {config.yarn.factor, config.yarn.beta_fast, config.yarn.beta_slow,
                                               config.yarn.original_positions});
  r.positions.resize(static_cast<size_t>(n_rows));
  for (int64_t t = 0; t < n_rows; ++t) r.positions[static_cast<size_t>(t)] = start + t;
  return r;
}

void rotate(const CallContext& context, const Rotation& rotation, int64_t n_heads, int64_t dim, bool is_inverse,
            float* x) {
  const int64_t n_rows = static_cast<int64_t>(rotation.positions.size());
  ops::rope(context.pool, {x, rotation.positions.data(), n_rows, n_heads, dim, context.config.rope_dim,
                           rotation.frequencies.data(), is_inverse});
  round_if_vendor(context, x, n_rows * n_heads * dim);
}

Queries make_queries(const CallContext& context, const AttentionWeights& w, const std::string& prefix,
                     const Rotation& rotation, const float* x, int64_t n_rows) {
  Queries out;
  out.qr = project(context, w.wq_a, prefix + "attn.wq_a", x, n_rows, Rounding::kActQuant);
  normalise(context, out.qr.data(), w.q_norm, n_rows, out.qr.data());
  out.q = project(context, w.wq_b, prefix + "attn.wq_b", out.qr.data(), n_rows, Rounding::kActQuant);
  rotate(context, rotation, context.config.n_heads, context.config.head_dim, false, out.q.data());
  return out;
}

std::vector<float> make_window_keys(const CallContext& context, const AttentionWeights& w, const std::string& prefix,
                                    const Rotation& rotation, const float* x, int64_t n_rows) {
  const int64_t dim = context.config.head_dim;
  std::vector<float> kv = project(context, w.wkv, prefix + "attn.wkv", x, n_rows, Rounding::kActQuant);
  normalise(context, kv.data(), w.kv_norm, n_rows, kv.data());
  rotate(context, rotation, 1, dim, false, kv.data());
  if (context.numerics != Numerics::kFull) {
    ops::fake_quant(context.pool, {kv.data(), n_rows, dim, ops::FakeQuantFormat::kAct});
  }
  return kv;
}

void project_output(const CallContext& context, const AttentionWeights& w, const std::string& prefix,
                    const Rotation& rotation, float* o, int64_t n_rows, float* y) {
  const Config& c = context.config;
  rotate(context, rotation, c.n_heads, c.head_dim, true, o);
  const int64_t group_in = c.n_heads / c.o_groups * c.head_dim;
  const int64_t concat = c.o_groups * c.o_lora_rank;
  std::vector<float> group(static_cast<size_t>(n_rows * group_in));
  std::vector<float> part(static_cast<size_t>(n_rows * c.o_lora_rank));
  std::vector<float> t(static_cast<size_t>(n_rows * concat));
  for (int64_t g = 0; g < c.o_groups; ++g) {
    for (int64_t row = 0; row < n_rows; ++row) {
      std::copy_n(o + row * c.n_heads * c.head_dim + g * group_in, group_in, group.data() + row * group_in);
    }
    project(context, w.wo_a[static_cast<size_t>(g)], prefix + "attn.wo_a.slice." + std::to_string(g), group.data(),
            n_rows, Rounding::kBf16, part.data());
    for (int64_t row = 0; row < n_rows; ++row) {
      std::copy_n(part.data() + row * c.o_lora_rank, c.o_lora_rank, t.data() + row * concat + g * c.o_lora_rank);
    }
  }
  project(context, w.wo_b, prefix + "attn.wo_b", t.data(), n_rows, Rounding::kActQuant, y);
}

std::vector<float> attend(const CallContext& context, const AttentionWeights& w, const std::vector<float>& q,
                          const KeyLists& lists) {
  const Config& c = context.config;
  std::vector<float> o(q.size());
  ops::AttentionParams p;
  p.q = q.data();
  p.keys = lists.keys.data();
  p.key_begin = lists.begin.data();
  p.sink = w.sink.data();
  p.out = o.data();
  p.n_rows = static_cast<int64_t>(lists.begin.size()) - 1;
  p.n_heads = c.n_heads;
  p.head_dim = c.head_dim;
  p.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(c.head_dim)));
  p.is_online = context.numerics == Numerics::kVendor;
  ops::attention(context.pool, p);
  round_if_vendor(context, o.data(), static_cast<int64_t>(o.size()));
  return o;
}

void layer_attention(const CallContext& context, const AttentionWeights& w, int layer, SequenceState& state,
                     StreamState& stream, const float* x, float* y) {
  const Config& c = context.config;
  const int64_t n_rows = stream.n_rows();
  const int64_t start = stream.start;
  const std::string prefix = block_prefix(c, layer);
  const Rotation rotation = make_rotation(c, layer, start, n_rows);
  const Queries queries = make_queries(context, w, prefix, rotation, x, n_rows);
  const std::vector<float> own = make_window_keys(context, w, prefix, rotation, x, n_rows);
  if (c.is_kv_source(layer)) compress(context, w, layer, state, stream, x);
  if (c.is_index_source(layer)) select_entries(context, w, layer, state, stream, x, queries.qr, rotation);

  WindowRing& ring = state.windows[static_cast<size_t>(layer)];
  const bool is_compressed = c.ratio(layer) > 0;
  const float* entries =
      is_compressed ? state.compressed[static_cast<size_t>(c.kv_source_of(layer))].kv.data() : nullptr;
  KeyLists lists;
  for (int64_t t = 0; t < n_rows; ++t) {
    const int64_t p = start + t;
    const int64_t first = std::max<int64_t>(0, p - c.window + 1);
    for (int64_t j = first; j <= p; ++j)
      lists.keys.push_back(j < start ? ring.row(j) : own.data() + (j - start) * c.head_dim);
    if (context.numerics == Numerics::kVendor) {
      // The vendor's list has a fixed number of window places; empty ones shift the blocks of the online softmax.
      const int64_t places = start == 0 ? std::min(c.window, n_rows) : c.window;
      for (int64_t j = p - first + 1; j < places; ++j) lists.keys.push_back(nullptr);
    }
    if (is_compressed) {
      for (int64_t i = stream.selected.begin[static_cast<size_t>(t)];
           i < stream.selected.begin[static_cast<size_t>(t + 1)]; ++i) {
        lists.keys.push_back(entries + stream.selected.entries[static_cast<size_t>(i)] * c.head_dim);
      }
    }
    lists.begin.push_back(static_cast<int64_t>(lists.keys.size()));
  }
  std::vector<float> o = attend(context, w, queries.q, lists);
  if (context.observer != nullptr) {
    context.observer->value(layer, "core.q", queries.q.data(), n_rows, c.n_heads * c.head_dim);
    context.observer->value(layer, "core.o", o.data(), n_rows, c.n_heads * c.head_dim);
  }
  for (int64_t t = std::max<int64_t>(0, n_rows - ring.n_slots); t < n_rows; ++t) {
    std::copy_n(own.data() + t * c.head_dim, c.head_dim, ring.row(start + t));
  }
  project_output(context, w, prefix, rotation, o.data(), n_rows, y);
}

}  // namespace espalier
