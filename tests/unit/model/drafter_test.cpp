// The DSpark drafter against the vendor's recordings: ids, logits, confidence, ring contents, first call's streams.
#include "model/drafter.h"

#include "unit/model/golden_fixture.h"

namespace espalier {
namespace {

// Drafts after each recorded backbone position, exactly as the recording was made: prompt, then its own greedy path.
void expect_drafts(const std::string& p, const Recorded& reference, Numerics numerics, float tolerance) {
  const Model& m = *tiny_model();
  const Config& c = m.config();
  SequenceState state(c);
  DrafterState drafter(c);
  ForwardOptions o;
  o.numerics = numerics;
  const ForwardResult prefill = must_forward(state, prompt(p), o);
  ASSERT_TRUE(
      seed_drafter(m, drafter, prefill.taps, static_cast<int64_t>(prompt(p).size()), numerics, test_pool()).ok());
  const std::vector<int64_t> ids = reference.integers(p + ".draft.ids");
  const std::vector<int64_t> positions = reference.integers(p + ".draft.position");
  const std::vector<float> logits = reference.floats(p + ".draft.logits");
  const std::vector<float> confidence = reference.floats(p + ".draft.confidence");
  const std::vector<int32_t> fed = reference.ids(p + ".decode.owner.tokens");
  const int64_t block = c.drafter.block_size;
  size_t next = 0;
  for (size_t n = 0; n < positions.size(); ++n) {
    while (state.n_tokens() <= positions[n]) {  // the backbone processes up to the recorded position
      const ForwardResult r = must_forward(state, {&fed[next++], 1}, o);
      ASSERT_TRUE(seed_drafter(m, drafter, r.taps, 1, numerics, test_pool()).ok());
    }
    const int32_t token = static_cast<int32_t>(ids[n * static_cast<size_t>(block + 1)]);
    const auto result = draft(m, drafter, token, numerics, test_pool());
    ASSERT_TRUE(result.ok()) << result.error().message();
    const std::string what = p + " draft at " + std::to_string(positions[n]);
    const size_t row = n * static_cast<size_t>(block);
    const std::vector<float> expected(
        logits.begin() + static_cast<std::ptrdiff_t>(row) * c.vocab,
        logits.begin() + static_cast<std::ptrdiff_t>(row + static_cast<size_t>(block)) * c.vocab);
    const Difference d = difference(result->logits.f32(), expected);
    EXPECT_LE(d.worst, tolerance) << what << ": " << d;
    for (int64_t j = 0; j < block; ++j) {
      EXPECT_EQ(result->ids[static_cast<size_t>(j)],
                ids[n * static_cast<size_t>(block + 1) + 1 + static_cast<size_t>(j)])
          << what << " token " << j;
      EXPECT_NEAR(result->confidence.f32()[j], confidence[row + static_cast<size_t>(j)], tolerance)
          << what << " token " << j;
    }
  }
}

TEST(GoldenDrafter, ids_logits_and_confidence_equal_the_vendors_on_full) {
  for (const std::string& p : prompt_names()) expect_drafts(p, fp32(), Numerics::kFull, 1e-3f);
}

TEST(GoldenDrafter, ids_logits_and_confidence_agree_on_kvq) {
  for (const std::string& p : prompt_names()) expect_drafts(p, fp32kvq(), Numerics::kKvq, 1e-2f);
}

TEST(GoldenDrafter, rings_hold_the_recorded_keys_after_the_prompt) {
  const Model& m = *tiny_model();
  const Config& c = m.config();
  SequenceState state(c);
  DrafterState drafter(c);
  ForwardOptions o;
  o.numerics = Numerics::kFull;
  const ForwardResult prefill = must_forward(state, prompt("p40"), o);
  ASSERT_TRUE(seed_drafter(m, drafter, prefill.taps, 40, Numerics::kFull, test_pool()).ok());
  for (int k = 0; k < c.drafter.n_stages; ++k) {
    const Difference d = difference(drafter.rings[static_cast<size_t>(k)].rows.data(),
                                    fp32().floats("p40.draft.cache.S" + std::to_string(k) + ".after_prompt"));
    EXPECT_LE(d.worst, 1e-4f) << "stage " << k << ": " << d;
  }
}

TEST(GoldenDrafter, seeding_token_by_token_equals_seeding_the_prompt) {
  const Model& m = *tiny_model();
  const Config& c = m.config();
  ForwardOptions o;
  o.numerics = Numerics::kFull;
  SequenceState state(c);
  const ForwardResult prefill = must_forward(state, prompt("p40"), o);
  DrafterState whole(c);
  ASSERT_TRUE(seed_drafter(m, whole, prefill.taps, 40, o.numerics, test_pool()).ok());
  DrafterState steps(c);
  const int64_t width = prefill.taps.dim(1);
  for (int64_t t = 0; t < 40; ++t) {
    const Tensor row = Tensor::from<float>({1, width}, {prefill.taps.f32() + t * width, static_cast<size_t>(width)});
    ASSERT_TRUE(seed_drafter(m, steps, row, 1, o.numerics, test_pool()).ok());
  }
  for (size_t k = 0; k < whole.rings.size(); ++k) EXPECT_EQ(whole.rings[k].rows, steps.rings[k].rows);
}

TEST(Drafter, refuses_to_draft_before_anything_was_seeded_and_ids_outside_the_vocabulary) {
  const Model& m = *tiny_model();
  DrafterState drafter(m.config());
  EXPECT_EQ(draft(m, drafter, 3, Numerics::kFull, test_pool()).status().code(), StatusCode::kFailedPrecondition);
  SequenceState state(m.config());
  const ForwardResult prefill = must_forward(state, prompt("p5"), {});
  ASSERT_TRUE(seed_drafter(m, drafter, prefill.taps, 5, Numerics::kKvq, test_pool()).ok());
  EXPECT_EQ(draft(m, drafter, 512, Numerics::kKvq, test_pool()).status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace espalier
