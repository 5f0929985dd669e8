#include "stages/quantize/encode.h"

#include <gmock/gmock.h>

#include <cmath>
#include <cstring>

#include "codec/quantizer.h"
#include "model/moe.h"
#include "stages/quantize/output_metrics.h"
#include "stages/quantize/stream.h"
#include "unit/stages/tiny_model.h"

namespace espalier {
namespace {

// One native layer of the tiny model with the inputs that reach it.
struct LayerCase {
  LayerCase(int layer, const std::vector<DatasetRow>& rows, ThreadPool& pool)
      : context(test::tiny_context(pool)),
        weights(test::tiny_loader().load_block(pool, layer).value()),
        specs(block_matrices(context.config, layer)),
        capture(specs, false, pool) {
    SilentProgress progress;
    const GlobalWeights globals = test::tiny_loader().load_globals(pool).value();
    CalibrationStream stream = CalibrationStream::begin(context, globals, rows).value();
    for (int before = 0; before < layer; ++before) {
      const BlockWeights w = test::tiny_loader().load_block(pool, before).value();
      EXPECT_TRUE(stream.advance_layer(context, w, before, progress).ok());
    }
    EXPECT_TRUE(stream.observe_layer(context, weights, layer, &capture, progress).ok());
    capture.finish();
  }
  CallContext context;
  BlockWeights weights;
  std::vector<MatrixSpec> specs;
  BlockCapture capture;
};

// The block's matrices without the experts outside `experts` and without other matrices of more than 32 K weights: less to encode.
// K = 3, the fastest width to search.
BlockJob job_of(const LayerCase& c, const EncodeSettings& settings, int layer, const std::vector<int>& experts) {
  BlockJob job{c.context, settings, c.specs, {}, block_prefix(c.context.config, layer), c.context.config.n_experts};
  std::erase_if(job.specs, [&](const MatrixSpec& s) {
    return s.expert >= 0 ? std::find(experts.begin(), experts.end(), s.expert) == experts.end() : s.in * s.out > 256 * 128;
  });
  job.k2.assign(job.specs.size(), 6);
  return job;
}

// sum over tokens routed to e of g^2 x x^T in fp64, straight from the router.
std::vector<double> routed_gram(const LayerCase& c, int expert, ThreadPool& pool, int64_t* tokens, double* weight_sum) {
  const MoeInputs& in = c.capture.moe();
  const int64_t d = in.d_model;
  const Routing routing = route(c.context, c.weights.moe, in.x.data(), in.n_tokens(), c.context.config.n_active, 0);
  std::vector<double> h(static_cast<size_t>(d * d));
  *tokens = 0;
  *weight_sum = 0;
  for (int64_t t = 0; t < in.n_tokens(); ++t) {
    for (int64_t a = 0; a < routing.n_active; ++a) {
      if (routing.ids[static_cast<size_t>(t * routing.n_active + a)] != expert) continue;
      const double g = static_cast<double>(routing.weights[static_cast<size_t>(t * routing.n_active + a)]);
      ++*tokens;
      *weight_sum += g * g;
      const float* x = in.x.data() + t * d;
      for (int64_t i = 0; i < d; ++i) {
        for (int64_t j = 0; j < d; ++j)
          h[static_cast<size_t>(i * d + j)] += g * g * static_cast<double>(x[i]) * static_cast<double>(x[j]);
      }
    }
  }
  return h;
}

double relative_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double num = 0, den = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    num += (a[i] - b[i]) * (a[i] - b[i]);
    den += b[i] * b[i];
  }
  return std::sqrt(num / den);
}

Hessian expert_hessian(const MoeInputs& inputs, int64_t n_experts, int expert, ThreadPool& pool) {
  const ExpertTokens routed = tokens_by_expert(inputs, n_experts)[static_cast<size_t>(expert)];
  std::vector<float> scale;
  for (float g : routed.weights) scale.push_back(routing_scale(g, 2));
  HessianAccumulator accumulator(inputs.d_model);
  add_rows(pool, inputs, routed.tokens, scale.data(), &accumulator);
  return accumulator.finish(pool);
}

TEST(Encode, every_experts_hessian_holds_the_tokens_that_the_router_sends_to_it) {
  // The fault "expert 0's Hessian for all" (or all tokens for all) breaks the counts and the sums of every other expert
  // here.
  ThreadPool pool(2);
  const LayerCase c(3, test::random_token_rows({150, 90, 60}, "encode"), pool);
  int64_t total = 0;
  for (int e = 0; e < c.context.config.n_experts; ++e) {
    int64_t tokens = 0;
    double weight_sum = 0;
    const std::vector<double> expected = routed_gram(c, e, pool, &tokens, &weight_sum);
    const Hessian h = expert_hessian(c.capture.moe(), c.context.config.n_experts, e, pool);
    EXPECT_EQ(h.rows, tokens) << "expert " << e;
    EXPECT_NEAR(h.weight_sum, weight_sum, 1e-6 * weight_sum);
    if (tokens > 0) {
      EXPECT_LT(relative_difference(h.sum, expected), 1e-5) << "expert " << e;
    }
    total += tokens;
  }
  EXPECT_EQ(total, 300 * c.context.config.n_active);
}

TEST(Encode, an_experts_hessian_changes_with_its_own_tokens_only) {
  ThreadPool pool(2);
  const LayerCase c(2, test::random_token_rows({150, 90}, "encode"), pool);
  const int64_t n_experts = c.context.config.n_experts;
  const MoeInputs& all = c.capture.moe();
  // The first token that is not routed to expert 0, and the first that is, removed in turn.
  const auto without = [&](int64_t token) {
    MoeInputs in = all;
    in.x.erase(in.x.begin() + token * in.d_model, in.x.begin() + (token + 1) * in.d_model);
    in.ids.erase(in.ids.begin() + token * in.n_active, in.ids.begin() + (token + 1) * in.n_active);
    in.weights.erase(in.weights.begin() + token * in.n_active, in.weights.begin() + (token + 1) * in.n_active);
    return in;
  };
  const Hessian before = expert_hessian(all, n_experts, 0, pool);
  ASSERT_GT(before.rows, 0);
  const std::vector<int32_t> own = tokens_by_expert(all, n_experts)[0].tokens;
  int32_t foreign = 0;
  while (std::find(own.begin(), own.end(), foreign) != own.end()) ++foreign;
  EXPECT_EQ(expert_hessian(without(foreign), n_experts, 0, pool).sum, before.sum);
  EXPECT_NE(expert_hessian(without(own[0]), n_experts, 0, pool).sum, before.sum);
}

TEST(Encode, the_encoded_expert_is_what_the_codec_makes_of_its_own_blended_hessian) {
  // Ties the product's bytes to the invariant above: any other Hessian would give another digest.
  ThreadPool pool(2);
  LayerCase c(3, test::random_token_rows({150, 90}, "encode"), pool);
  const EncodeSettings settings;
  const std::vector<int> chosen = {1, 5};
  const BlockJob job = job_of(c, settings, 3, chosen);
  std::vector<std::vector<uint16_t>> expected;
  const HessianPrior prior = make_prior(*c.capture.ffn_input());
  for (int e : chosen) {
    const Hessian own = expert_hessian(c.capture.moe(), job.n_experts, e, pool);
    const BlendedHessian h = blend_with_prior(own, prior, 256.0 / 4);
    std::vector<float> w(256 * 128);
    c.weights.moe.experts[static_cast<size_t>(e)].w1.weight_kn(pool, w.data());
    codec::QuantizeOptions options;
    options.k2 = 6;
    options.name = "layers.3.ffn.experts." + std::to_string(e) + ".w1";
    options.damping = default_damping(own.effective_rows(), 256);
    const ExpertTokens routed = tokens_by_expert(c.capture.moe(), job.n_experts)[static_cast<size_t>(e)];
    const GateUpMetrics metrics = gate_up_metrics(c.context, c.capture.moe(), c.weights.moe.experts[static_cast<size_t>(e)],
                                                  routed.tokens, routed.weights.data());
    options.output.diagonal = metrics.w1.data();
    options.output_damping = kOutputMetricDamping;
    expected.push_back(
        codec::quantize_matrix(w.data(), 256, 128, h.values.data(), options, pool).value().tensor.trellis);
  }
  std::vector<MatrixRecord> records;
  BlockCoverage coverage;
  SilentProgress progress;
  const Status status = encode_block(job, c.capture, c.weights, &records, &coverage, progress);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(c.weights.moe.experts[0].w1.exl3(), nullptr);  // not in the job: left alone
  for (size_t i = 0; i < chosen.size(); ++i) {
    const codec::Exl3View* got = c.weights.moe.experts[static_cast<size_t>(chosen[i])].w1.exl3();
    ASSERT_NE(got, nullptr);
    EXPECT_EQ(std::memcmp(got->trellis.words, expected[i].data(), expected[i].size() * 2), 0) << "expert " << chosen[i];
  }

  // The audit says the same as the router.
  EXPECT_EQ(coverage.tokens, 240);
  ASSERT_EQ(coverage.expert_tokens.size(), 8u);
  for (int e = 0; e < 8; ++e) {  // the router itself is never quantized
    int64_t tokens = 0;
    double weight_sum = 0;
    routed_gram(c, e, pool, &tokens, &weight_sum);
    EXPECT_EQ(coverage.expert_tokens[static_cast<size_t>(e)], tokens);
  }
  size_t quantizable = 0;
  for (const MatrixSpec& spec : job.specs) quantizable += spec.is_quantizable ? 1 : 0;
  EXPECT_EQ(records.size(), quantizable);
  for (const MatrixRecord& r : records) {
    EXPECT_EQ(r.hessian, "calibrated") << r.stem;
    EXPECT_GT(r.true_error, 0) << r.stem;
    EXPECT_LT(r.true_error, 0.06) << r.stem;
  }
}

TEST(Encode, dense_matrices_of_one_input_share_its_hessian_and_others_do_not) {
  ThreadPool pool(2);
  const LayerCase c(4, test::random_token_rows({150, 33}, "dense"), pool);
  const auto find = [&](MatrixKind kind, int group = -1) -> const MatrixSpec& {
    return *std::find_if(c.specs.begin(), c.specs.end(),
                         [&](const MatrixSpec& s) { return s.kind == kind && (group < 0 || s.group == group); });
  };
  const Hessian* input = c.capture.hessian_of(find(MatrixKind::kWqA));
  ASSERT_NE(input, nullptr);
  EXPECT_EQ(input->rows, 183);
  EXPECT_EQ(c.capture.hessian_of(find(MatrixKind::kWkv)), input);
  EXPECT_EQ(c.capture.hessian_of(find(MatrixKind::kCompressorWkv)), input);
  EXPECT_EQ(c.capture.hessian_of(find(MatrixKind::kWqB)), c.capture.hessian_of(find(MatrixKind::kIndexerWqB)));
  EXPECT_NE(c.capture.hessian_of(find(MatrixKind::kWoA, 0)), c.capture.hessian_of(find(MatrixKind::kWoA, 1)));
  EXPECT_NE(c.capture.hessian_of(find(MatrixKind::kWoA, 0))->sum, c.capture.hessian_of(find(MatrixKind::kWoA, 1))->sum);
  EXPECT_EQ(c.capture.hessian_of(find(MatrixKind::kSharedW1)), c.capture.ffn_input());
  EXPECT_EQ(c.capture.hessian_of(find(MatrixKind::kEngramWkv))->k, 384);
  // The FFN input's Hessian is the Gram matrix of the rows that the router saw.
  HessianAccumulator again(256);
  again.add(pool, c.capture.moe().x.data(), c.capture.moe().n_tokens());
  EXPECT_EQ(again.finish(pool).sum, c.capture.ffn_input()->sum);
}

TEST(Encode, w2_may_be_fed_by_native_or_by_quantized_w1_and_w3) {
  ThreadPool pool(2);
  const std::vector<DatasetRow> rows = test::random_token_rows({120}, "w2");
  std::vector<MatrixRecord> records[2];
  for (int i = 0; i < 2; ++i) {
    LayerCase c(0, rows, pool);
    EncodeSettings settings;
    settings.w2_input = i == 0 ? W2Input::kNative : W2Input::kQuantized;
    const BlockJob job = job_of(c, settings, 0, {2});
    BlockCoverage coverage;
    SilentProgress progress;
    ASSERT_TRUE(encode_block(job, c.capture, c.weights, &records[i], &coverage, progress).ok());
  }
  ASSERT_EQ(records[0].size(), records[1].size());
  int w2_differs = 0;
  for (size_t i = 0; i < records[0].size(); ++i) {
    const bool is_w2 = records[0][i].stem.find(".experts.") != std::string::npos && records[0][i].stem.ends_with(".w2");
    if (is_w2)
      w2_differs += records[0][i].sha256 != records[1][i].sha256 ? 1 : 0;
    else
      EXPECT_EQ(records[0][i].sha256, records[1][i].sha256) << records[0][i].stem;
  }
  EXPECT_EQ(w2_differs, 1);
}

TEST(Encode, the_residual_metric_is_w2s_alone_and_lowers_the_weighted_error) {
  ThreadPool pool(2);
  const std::vector<DatasetRow> rows = test::random_token_rows({150, 90}, "encode");
  SilentProgress progress;
  const ResidualMetrics residual = ResidualMetrics::make(test::tiny_loader(), rows, progress, pool).value();
  std::vector<MatrixRecord> records[2];
  for (const bool with : {false, true}) {
    LayerCase c(3, rows, pool);
    BlockJob job = job_of(c, EncodeSettings(), 3, {1});
    std::erase_if(job.specs, [](const MatrixSpec& s) { return s.expert < 0; });
    job.k2.assign(job.specs.size(), 4);
    if (with) job.residual_metric = residual.of_layer(3);
    BlockCoverage coverage;
    ASSERT_TRUE(encode_block(job, c.capture, c.weights, &records[with], &coverage, progress).ok());
    ASSERT_EQ(records[with].size(), 3u);
  }
  for (size_t i = 0; i < 3; ++i) {
    const bool is_w2 = records[0][i].stem.ends_with("w2");
    EXPECT_EQ(records[0][i].sha256 != records[1][i].sha256, is_w2) << records[0][i].stem;
    if (is_w2) {
      EXPECT_EQ(records[0][i].weighted_error, records[0][i].true_error);
      EXPECT_LT(records[1][i].weighted_error, records[0][i].true_error);
    }
  }
}

TEST(Encode, shared_scales_give_w1_and_w3_one_input_scale_and_leave_the_rest_alone) {
  ThreadPool pool(2);
  const std::vector<DatasetRow> rows = test::random_token_rows({120}, "shared");
  for (const bool shared : {false, true}) {
    LayerCase c(0, rows, pool);
    EncodeSettings settings;
    settings.shared_scales = shared;
    const BlockJob job = job_of(c, settings, 0, {2});
    std::vector<MatrixRecord> records;
    BlockCoverage coverage;
    SilentProgress progress;
    ASSERT_TRUE(encode_block(job, c.capture, c.weights, &records, &coverage, progress).ok());
    const ExpertWeights& expert = c.weights.moe.experts[2];
    const bool equal = std::memcmp(expert.w1.exl3()->suh, expert.w3.exl3()->suh, 256 * 2) == 0;
    EXPECT_EQ(equal, shared);
    for (const MatrixRecord& r : records) EXPECT_LT(r.true_error, 0.06) << r.stem;
  }
}

TEST(Encode, an_expert_without_tokens_and_dead_channels_are_recorded_by_name) {
  ThreadPool pool(1);
  LayerCase c(0, test::random_token_rows({40}, "odd"), pool);
  // A matrix by hand: input 3 never active, and no tokens behind the Hessian.
  const MatrixSpec& spec = *std::find_if(c.specs.begin(), c.specs.end(), [](const MatrixSpec& s) { return s.expert == 1; });
  std::vector<double> hessian(static_cast<size_t>(spec.in * spec.in));
  for (int64_t i = 0; i < spec.in; ++i) hessian[static_cast<size_t>(i * spec.in + i)] = i == 3 ? 0.0 : 1.0;
  MatrixRecord record;
  Linear* linear = find_linear(c.weights, spec);
  ASSERT_TRUE(encode_matrix(EncodeSettings(), {spec, 4, linear, &record}, hessian.data(), {}, pool).ok());
  std::vector<std::string> texts;
  for (const codec::Fallback& f : record.fallbacks) texts.push_back(codec::fallback_text(f));
  EXPECT_THAT(texts, ::testing::ElementsAre("inputs without calibration activity: weighed by damping alone (1 from index 3 on)",
                                            "no calibration tokens: the layer's prior alone"));
  EXPECT_EQ(record.damping, 1.0);
}

TEST(Encode, routing_exponents_turn_into_row_scales) {
  EXPECT_EQ(routing_scale(0.3f, 0), 1.0f);
  EXPECT_EQ(routing_scale(0.3f, 2), 0.3f);
  EXPECT_FLOAT_EQ(routing_scale(0.25f, 1), 0.5f);
  EXPECT_EQ(routing_scale(0.0f, 1), 0.0f);
}

TEST(Encode, sampled_tokens_ascend_cover_the_range_and_depend_on_seed_and_name) {
  const std::vector<int32_t> a = sample_tokens(1000, 64, 1, "x");
  ASSERT_EQ(a.size(), 64u);
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_GE(a[i], static_cast<int32_t>(i * 1000 / 64));
    EXPECT_LT(a[i], static_cast<int32_t>((i + 1) * 1000 / 64));
  }
  EXPECT_EQ(a, sample_tokens(1000, 64, 1, "x"));
  EXPECT_NE(a, sample_tokens(1000, 64, 2, "x"));
  EXPECT_NE(a, sample_tokens(1000, 64, 1, "y"));
  EXPECT_EQ(sample_tokens(5, 64, 1, "x"), (std::vector<int32_t>{0, 1, 2, 3, 4}));
}

}  // namespace
}  // namespace espalier
