#include "stages/eval/statistics.h"

#include <gmock/gmock.h>

#include <cmath>
#include <vector>

#include "base/rng.h"
#include "stages/eval/sidecar.h"
#include "unit/stages/test_files.h"

namespace espalier {
namespace {

using ::testing::HasSubstr;

const std::vector<float> kNative = {0, 1, 2, 3};
const std::vector<float> kQuantized = {0, 1.5f, 1.5f, 3};

TEST(Statistics, kl_has_the_published_golden_values_in_both_directions) {
  EXPECT_NEAR(score_position(kNative, kQuantized, 0).kl, 0.0375061, 5e-8);
  EXPECT_NEAR(score_position(kQuantized, kNative, 0).kl, 0.0373631, 5e-8);
}

TEST(Statistics, top_k_kl_keeps_the_rest_bucket_and_is_a_lower_bound) {
  const std::vector<int32_t> top2 = {3, 2};
  const double kl = top_k_kl(kNative, kQuantized, top2);
  EXPECT_NEAR(kl, 0.0348095, 5e-8);
  EXPECT_LT(kl, score_position(kNative, kQuantized, 0).kl);
  const std::vector<int32_t> top3 = {3, 2, 1};  // the rest is one id: the coarse-grained KL is the full one
  EXPECT_NEAR(top_k_kl(kNative, kQuantized, top3), 0.0375061, 5e-8);
}

TEST(Statistics, equal_logits_have_exactly_zero_kl) {
  const CounterRng rng(1, "logits");
  std::vector<float> x(1000);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(40 * rng.uniform(i) - 20);
  const PositionScore score = score_position(x, x, 17);
  EXPECT_EQ(score.kl, 0.0);
  EXPECT_EQ(score.nll_reference, score.nll_candidate);
  EXPECT_TRUE(score.same_top1);
}

TEST(Statistics, kl_is_invariant_under_a_shift_of_either_side) {
  std::vector<float> shifted = kQuantized;
  for (float& x : shifted) x += 64;
  EXPECT_NEAR(score_position(kNative, shifted, 1).kl, 0.0375061, 5e-8);
}

TEST(Statistics, nll_and_confidence_are_those_of_the_softmax) {
  const double total = 1 + std::exp(1) + std::exp(2) + std::exp(3);
  const PositionScore score = score_position(kNative, kQuantized, 2);
  EXPECT_NEAR(score.nll_reference, -std::log(std::exp(2) / total), 1e-12);
  EXPECT_NEAR(score.confidence, std::exp(3) / total, 1e-12);
  EXPECT_NEAR(negative_log_likelihood(kNative, 2), score.nll_reference, 0);
}

TEST(Statistics, argmax_ties_go_to_the_lower_id) {
  EXPECT_EQ(argmax(std::vector<float>{1, 3, 3, 2}), 1);
  EXPECT_FALSE(score_position(std::vector<float>{1, 3, 3}, std::vector<float>{1, 2, 3}, 0).same_top1);
}

TEST(Statistics, percentiles_interpolate_linearly) {
  const std::vector<double> v = {0, 1, 2, 10};
  EXPECT_DOUBLE_EQ(percentile(v, 0), 0);
  EXPECT_DOUBLE_EQ(percentile(v, 0.5), 1.5);
  EXPECT_DOUBLE_EQ(percentile(v, 0.9), 2 + 0.7 * 8);
  EXPECT_DOUBLE_EQ(percentile(v, 1), 10);
}

TEST(Statistics, confidence_buckets_include_their_lower_edge) {
  EXPECT_EQ(confidence_bucket(0.0), 0);
  EXPECT_EQ(confidence_bucket(0.25), 1);
  EXPECT_EQ(confidence_bucket(0.7499), 2);
  EXPECT_EQ(confidence_bucket(0.75), 3);
  EXPECT_EQ(confidence_bucket(1.0), 4);
}

Sidecar small_sidecar() {
  Sidecar s;
  s.row = {0, 0, 1};
  s.position = {4, 5, 2};
  s.domain = {0, 0, 1};
  s.kl = {0.5f, 0.25f, 0};
  s.nll_reference = {1, 2, 3};
  s.nll_candidate = {1.5f, 2, 3};
  s.confidence = {0.5f, 0.5f, 0.75f};
  s.same_top1 = {1, 0, 1};
  s.domains = {"code", "prose"};
  s.metadata = {{"panel_sha256", "abc"}};
  return s;
}

TEST(Sidecar, a_written_sidecar_reads_back_equal) {
  const test::TempFolder dir;
  const Sidecar s = small_sidecar();
  ASSERT_TRUE(write_sidecar(dir / "s.safetensors", s).ok());
  const Result<Sidecar> r = read_sidecar(dir / "s.safetensors");
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_EQ(r->row, s.row);
  EXPECT_EQ(r->position, s.position);
  EXPECT_EQ(r->kl, s.kl);
  EXPECT_EQ(r->same_top1, s.same_top1);
  EXPECT_EQ(r->domains, s.domains);
  EXPECT_EQ(r->metadata.at("panel_sha256"), "abc");
}

TEST(Sidecar, unequal_lengths_and_foreign_domains_are_refused) {
  const test::TempFolder dir;
  Sidecar s = small_sidecar();
  s.position.pop_back();
  ASSERT_TRUE(write_sidecar(dir / "a.safetensors", s).ok());
  EXPECT_THAT(read_sidecar(dir / "a.safetensors").error().message(), HasSubstr("different lengths"));
  s = small_sidecar();
  s.domain[1] = 2;
  ASSERT_TRUE(write_sidecar(dir / "b.safetensors", s).ok());
  EXPECT_THAT(read_sidecar(dir / "b.safetensors").error().message(),
              HasSubstr("domain index 2 is outside the 2 domains"));
  test::write_file(dir / "c.safetensors", "short");
  EXPECT_EQ(read_sidecar(dir / "c.safetensors").error().code(), StatusCode::kDataLoss);
}

}  // namespace
}  // namespace espalier
