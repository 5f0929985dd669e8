// A forward is the loop over layers: streaming gives its bits, a layer alone with carried state gives its bits, and
// dropping any carried part changes them (quality.md 1.3). Also: thread counts, SIMD tiers, taking tokens back.
#include <algorithm>

#include "base/simd_tier.h"
#include "unit/model/golden_fixture.h"

namespace espalier {
namespace {

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && std::memcmp(a.data(), b.data(), static_cast<size_t>(a.size_bytes())) == 0;
}

CallContext native_context(ThreadPool& pool) {
  const Model& m = *tiny_model();
  return {m.config(), m.engram_hashes, m.engram_token_map, Numerics::kFull, pool};
}

struct Snapshot {
  SequenceState state;
  StreamState stream;
};

// States before each layer, and after the last.
std::vector<Snapshot> run_all_layers(const std::vector<int32_t>& ids, Tensor* logits) {
  const Model& m = *tiny_model();
  const CallContext context = native_context(test_pool());
  SequenceState state(m.config());
  StreamState stream;
  CHECK(begin_call(context, m.globals, state, ids, &stream).ok());
  std::vector<Snapshot> out;
  for (int l = 0; l < m.config().n_layers; ++l) {
    out.push_back({state, stream});
    CHECK(run_layer(context, m.layers[static_cast<size_t>(l)], l, state, stream).ok());
  }
  out.push_back({state, stream});
  *logits = finish_call(context, m.globals, state, stream, true);
  return out;
}

TEST(Streaming, loading_and_running_one_layer_at_a_time_equals_the_whole_forward_bit_for_bit) {
  const auto loader = WeightLoader::open(golden_dir() + "/tiny-a", {});
  ASSERT_TRUE(loader.ok()) << loader.error().message();
  const CallContext context{loader->config(), loader->engram_hashes(), loader->engram_token_map(), Numerics::kFull,
                            test_pool()};
  const auto globals = loader->load_globals(test_pool());
  ASSERT_TRUE(globals.ok());
  // All sequences advance through a layer before the next layer is loaded.
  std::vector<SequenceState> states;
  std::vector<StreamState> streams(prompt_names().size());
  for (size_t i = 0; i < streams.size(); ++i) {
    states.emplace_back(loader->config());
    ASSERT_TRUE(begin_call(context, *globals, states[i], prompt(prompt_names()[i]), &streams[i]).ok());
  }
  for (int l = 0; l < loader->config().n_layers; ++l) {
    const auto layer = loader->load_block(test_pool(), l);
    ASSERT_TRUE(layer.ok()) << layer.error().message();
    for (size_t i = 0; i < streams.size(); ++i) ASSERT_TRUE(run_layer(context, *layer, l, states[i], streams[i]).ok());
  }
  for (size_t i = 0; i < streams.size(); ++i) {
    const Tensor logits = finish_call(context, *globals, states[i], streams[i], true);
    EXPECT_TRUE(same_bits(logits, all_logits(prompt(prompt_names()[i]), Numerics::kFull, 4096))) << prompt_names()[i];
  }
}

TEST(Streaming, a_layer_alone_with_carried_state_equals_the_layer_inside_the_forward) {
  const Model& m = *tiny_model();
  const CallContext context = native_context(test_pool());
  Tensor logits;
  const std::vector<Snapshot> before = run_all_layers(prompt("p40"), &logits);
  for (int l = 0; l < m.config().n_layers; ++l) {
    Snapshot s = before[static_cast<size_t>(l)];
    ASSERT_TRUE(run_layer(context, m.layers[static_cast<size_t>(l)], l, s.state, s.stream).ok());
    const Snapshot& after = before[static_cast<size_t>(l + 1)];
    EXPECT_TRUE(same_bits(s.stream.h, after.stream.h)) << l;
    EXPECT_TRUE(same_bits(s.stream.pre, after.stream.pre)) << l;
    EXPECT_EQ(s.stream.selected.entries, after.stream.selected.entries) << l;
  }
}

TEST(Streaming, running_a_layer_twice_from_position_0_leaves_the_same_state) {
  const Model& m = *tiny_model();
  const CallContext context = native_context(test_pool());
  Tensor logits;
  const std::vector<Snapshot> before = run_all_layers(prompt("p150"), &logits);
  for (int l = 0; l < m.config().n_layers; ++l) {
    Snapshot s = before[static_cast<size_t>(l)];
    StreamState capture = s.stream;  // a capture pass works on a copy of the stream, on the same state
    ASSERT_TRUE(run_layer(context, m.layers[static_cast<size_t>(l)], l, s.state, capture).ok());
    ASSERT_TRUE(run_layer(context, m.layers[static_cast<size_t>(l)], l, s.state, s.stream).ok());
    EXPECT_TRUE(same_bits(s.stream.h, before[static_cast<size_t>(l + 1)].stream.h)) << l;
  }
}

// The converse: each carried part matters, so the tests above would notice its loss.
TEST(Streaming, losing_pre_weights_compressed_entries_or_the_selection_changes_the_next_layer) {
  const Model& m = *tiny_model();
  const CallContext context = native_context(test_pool());
  Tensor logits;
  const std::vector<Snapshot> before = run_all_layers(prompt("p40"), &logits);
  const int layer = 3;  // reads layer 2's entries and selection
  const auto changes = [&](const std::function<void(Snapshot&)>& damage) {
    Snapshot s = before[layer];
    damage(s);
    CHECK(run_layer(context, m.layers[layer], layer, s.state, s.stream).ok());
    return !same_bits(s.stream.h, before[layer + 1].stream.h);
  };
  EXPECT_FALSE(changes([](Snapshot&) {}));
  EXPECT_TRUE(changes([](Snapshot& s) {
    std::fill_n(s.stream.pre.f32(), s.stream.pre.size(), 0.0f);
    for (int64_t t = 0; t < s.stream.pre.dim(0); ++t) s.stream.pre.f32()[t * 4] = 1.0f;
  }));
  EXPECT_TRUE(
      changes([](Snapshot& s) { std::fill(s.state.compressed[2].kv.begin(), s.state.compressed[2].kv.end(), 0.0f); }));
  EXPECT_TRUE(changes([](Snapshot& s) {
    s.stream.selected.entries.clear();
    std::fill(s.stream.selected.begin.begin(), s.stream.selected.begin.end(), 0);
  }));
}

TEST(Determinism, logits_have_the_same_bits_for_any_thread_count_and_simd_tier) {
  const Model& m = *tiny_model();
  for (Numerics numerics : {Numerics::kFull, Numerics::kKvq, Numerics::kVendor}) {
    std::vector<Tensor> results;
    for (SimdTier tier : usable_simd_tiers()) {
      ASSERT_TRUE(set_simd_tier(tier));
      for (int threads : {1, 2, 3}) {
        if (threads == 3 && tier == SimdTier::kBaseline) continue;
        ThreadPool pool(threads);
        SequenceState state(m.config());
        ForwardOptions o;
        o.numerics = numerics;
        o.all_logits = true;
        auto r = forward(m, state, prompt("p40"), o, pool);
        ASSERT_TRUE(r.ok());
        results.push_back(std::move(r->logits));
        EXPECT_TRUE(same_bits(results.front(), results.back())) << simd_tier_name(tier) << " " << threads << " threads";
      }
    }
  }
  reset_simd_tier();
}

TEST(Determinism, the_reference_operations_give_the_same_network_within_rounding) {
  ASSERT_TRUE(set_simd_tier(SimdTier::kReference));
  const Tensor found = all_logits(prompt("p17"), Numerics::kFull, 4096);
  reset_simd_tier();
  const Difference d = difference(found.f32(), fp32().floats("p17.prefill.logits"));
  EXPECT_LE(d.worst, 1e-4f) << d;
}

TEST(SequenceState, taking_back_tokens_and_feeding_others_equals_never_having_seen_them) {
  const Model& m = *tiny_model();
  const std::vector<int32_t> ids = prompt("p150");
  ForwardOptions o;
  o.numerics = Numerics::kKvq;
  o.all_logits = true;
  for (int64_t keep : {17, 18, 37, 100}) {
    for (int64_t rejected : {1, 5, 16}) {
      SequenceState straight(m.config());
      SequenceState rewound(m.config());
      const std::span<const int32_t> head(ids.data(), static_cast<size_t>(keep));
      must_forward(straight, head, o);
      must_forward(rewound, head, o);
      must_forward(rewound, {ids.data() + 60, static_cast<size_t>(rejected)}, o);
      ASSERT_TRUE(rewound.truncate(keep).ok());
      EXPECT_EQ(rewound.n_tokens(), keep);
      const std::span<const int32_t> tail(ids.data() + keep, 23);
      const Tensor a = must_forward(straight, tail, o).logits;
      const Tensor b = must_forward(rewound, tail, o).logits;
      EXPECT_TRUE(same_bits(a, b)) << keep << " kept, " << rejected << " taken back";
    }
  }
}

TEST(SequenceState, partly_accepted_drafts_and_a_reset_leave_no_trace) {
  const Model& m = *tiny_model();
  const std::vector<int32_t> ids = prompt("p150");
  ForwardOptions o;
  o.numerics = Numerics::kFull;
  o.all_logits = true;
  SequenceState state(m.config());
  must_forward(state, {ids.data(), 20}, o);
  for (int64_t n = 20; n < 100; n += 3) {  // six drafted, three accepted, again and again
    must_forward(state, {ids.data() + n, 3}, o);
    must_forward(state, {ids.data() + 5, 3}, o);
    ASSERT_TRUE(state.truncate(n + 3).ok());
  }
  const int64_t n = state.n_tokens();
  const Tensor found = must_forward(state, {ids.data() + n, 1}, o).logits;
  SequenceState fresh(m.config());
  must_forward(fresh, {ids.data(), static_cast<size_t>(n)}, o);
  EXPECT_TRUE(same_bits(found, must_forward(fresh, {ids.data() + n, 1}, o).logits));
  state.reset();
  EXPECT_TRUE(
      same_bits(must_forward(state, prompt("p17"), o).logits, all_logits(prompt("p17"), Numerics::kFull, 4096)));
}

TEST(SequenceState, more_than_kRewindRows_cannot_be_taken_back) {
  const Model& m = *tiny_model();
  SequenceState state(m.config());
  must_forward(state, prompt("p40"), {});
  EXPECT_EQ(state.truncate(23).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(state.truncate(41).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(state.truncate(24).ok());
  EXPECT_TRUE(state.truncate(0).ok());
  EXPECT_EQ(state.n_tokens(), 0);
}

}  // namespace
}  // namespace espalier
