// The three ways in which a public layer-by-layer converter went wrong (quality specification 1.3), as invariants:
//   1. an expert's Hessian holds exactly the tokens routed to it          -> encode_test.cpp
//   2. a layer that reuses a source layer's pool sees that pool            -> here
//   3. collapse weights computed by one sub-layer reach the next layer     -> here
// The streamed run must give the bits of one plain forward pass; the tests named "…_is_seen" put each fault in by hand
// and show that this comparison notices it.
#include "stages/quantize/stream.h"

#include <gtest/gtest.h>

#include <cstring>

#include "stages/quantize/capture.h"
#include "unit/stages/tiny_model.h"

namespace espalier {
namespace {

struct Native {
  GlobalWeights globals;
  std::vector<BlockWeights> layers;
};

Native load_native(ThreadPool& pool) {
  Native out;
  const WeightLoader& loader = test::tiny_loader();
  Result<GlobalWeights> globals = loader.load_globals(pool);
  EXPECT_TRUE(globals.ok()) << globals.status().message();
  out.globals = std::move(globals).value();
  for (int layer = 0; layer < loader.config().n_layers; ++layer) {
    Result<BlockWeights> block = loader.load_block(pool, layer);
    EXPECT_TRUE(block.ok()) << block.status().message();
    out.layers.push_back(std::move(block).value());
  }
  return out;
}

Tensor plain_logits(const std::vector<int32_t>& ids, Numerics numerics, ThreadPool& pool) {
  static const std::shared_ptr<const Model> model = Model::load(test::tiny_dir(), {}, pool).value();
  SequenceState state(model->config());
  ForwardOptions options;
  options.numerics = numerics;
  options.all_logits = true;
  options.chunk = 64;
  return forward(*model, state, ids, options, pool).value().logits;
}

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && std::memcmp(a.data(), b.data(), static_cast<size_t>(a.size_bytes())) == 0;
}

// 150 tokens: the window wraps, top-k and candidate blocks prune, ratio-2 groups close and stay open.
const std::vector<int> kLengths = {150, 1, 17, 64, 97};

TEST(CalibrationStream, a_streamed_run_with_capture_equals_a_plain_forward_bit_for_bit) {
  ThreadPool pool(2);
  const std::vector<DatasetRow> rows = test::random_token_rows(kLengths, "stream");
  const Native native = load_native(pool);
  SilentProgress progress;
  for (Numerics numerics : {Numerics::kFull, Numerics::kKvq}) {
    const CallContext context = test::tiny_context(pool, numerics);
    CalibrationStream stream = CalibrationStream::begin(context, native.globals, rows).value();
    for (int layer = 0; layer < context.config.n_layers; ++layer) {
      const BlockWeights& weights = native.layers[static_cast<size_t>(layer)];
      BlockCapture capture(block_matrices(context.config, layer), false, pool);
      ASSERT_TRUE(stream.observe_layer(context, weights, layer, &capture, progress).ok());
      ASSERT_TRUE(stream.advance_layer(context, weights, layer, progress).ok());
    }
    for (size_t r = 0; r < rows.size(); ++r) {
      EXPECT_TRUE(same_bits(stream.logits(context, native.globals, r).value(), plain_logits(rows[r].ids, numerics, pool)))
          << "row of " << rows[r].ids.size() << " tokens, " << numerics_name(numerics);
    }
  }
}

// Runs all layers over one row and lets `fault` damage the state in front of each of them.
template <typename Fault>
Tensor logits_with(const Native& native, const std::vector<int32_t>& ids, ThreadPool& pool, Fault fault) {
  const CallContext context = test::tiny_context(pool);
  SequenceState state(context.config);
  StreamState stream;
  EXPECT_TRUE(begin_call(context, native.globals, state, ids, &stream).ok());
  for (int layer = 0; layer < context.config.n_layers; ++layer) {
    fault(layer, state, stream);
    EXPECT_TRUE(run_layer(context, native.layers[static_cast<size_t>(layer)], layer, state, stream).ok());
  }
  return finish_call(context, native.globals, state, stream, true);
}

TEST(CalibrationStream, a_pool_that_is_not_carried_to_the_reusing_layer_is_seen) {
  ThreadPool pool(2);
  const Native native = load_native(pool);
  const std::vector<int32_t> ids = test::random_token_rows({150}, "stream")[0].ids;
  const Tensor expected = plain_logits(ids, Numerics::kKvq, pool);
  ASSERT_TRUE(same_bits(logits_with(native, ids, pool, [](int, SequenceState&, StreamState&) {}), expected));
  // Layer 3 reads the pool of layer 2: zeros there are what a converter that rebuilds its state per layer would give
  // it.
  ASSERT_EQ(test::tiny_loader().config().kv_source_of(3), 2);
  const Tensor lost = logits_with(native, ids, pool, [](int layer, SequenceState& state, StreamState&) {
    if (layer == 3) std::fill(state.compressed[2].kv.begin(), state.compressed[2].kv.end(), 0.0f);
  });
  EXPECT_FALSE(same_bits(lost, expected));
}

TEST(CalibrationStream, collapse_weights_that_are_reset_at_a_layer_border_are_seen) {
  ThreadPool pool(2);
  const Native native = load_native(pool);
  const std::vector<int32_t> ids = test::random_token_rows({40}, "stream")[0].ids;
  const Tensor expected = plain_logits(ids, Numerics::kKvq, pool);
  for (int faulty = 1; faulty < test::tiny_loader().config().n_layers; ++faulty) {
    const Tensor lost = logits_with(native, ids, pool, [&](int layer, SequenceState&, StreamState& stream) {
      if (layer != faulty) return;
      const int64_t n_streams = stream.pre.dim(1);
      for (int64_t i = 0; i < stream.pre.size(); ++i) stream.pre.f32()[i] = i % n_streams == 0 ? 1.0f : 0.0f;
    });
    EXPECT_FALSE(same_bits(lost, expected)) << "pre reset in front of layer " << faulty;
  }
}

TEST(CalibrationStream, observing_a_layer_changes_nothing_that_later_layers_read) {
  ThreadPool pool(2);
  const Native native = load_native(pool);
  const CallContext context = test::tiny_context(pool);
  SilentProgress progress;
  const std::vector<DatasetRow> rows = test::random_token_rows({97}, "observe");
  CalibrationStream with = CalibrationStream::begin(context, native.globals, rows).value();
  CalibrationStream without = CalibrationStream::begin(context, native.globals, rows).value();
  LayerObserver nobody;
  for (int layer = 0; layer < context.config.n_layers; ++layer) {
    // Observed with other weights than those that advance, as in a real run where these are native and quantized.
    const BlockWeights& weights = native.layers[static_cast<size_t>(layer)];
    if (layer == 5) {
      BlockWeights other = test::tiny_loader().load_block(pool, layer).value();
      for (float& w : other.attn_norm) w *= 1.5f;
      ASSERT_TRUE(with.observe_layer(context, other, layer, &nobody, progress).ok());
    } else {
      ASSERT_TRUE(with.observe_layer(context, weights, layer, &nobody, progress).ok());
    }
    ASSERT_TRUE(with.advance_layer(context, weights, layer, progress).ok());
    ASSERT_TRUE(without.advance_layer(context, weights, layer, progress).ok());
  }
  EXPECT_TRUE(same_bits(with.logits(context, native.globals, 0).value(), without.logits(context, native.globals, 0).value()));
}

}  // namespace
}  // namespace espalier
