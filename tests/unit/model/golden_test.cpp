// `full` and `kvq` numerics against the vendor's code: logits in every way of feeding a prompt.
#include <algorithm>
#include <cmath>
#include <iostream>

#include "unit/model/golden_fixture.h"

namespace espalier {
namespace {

constexpr float kLogitTolerance = 1e-3f;
constexpr float kMargin = 2e-3f;

// Equal within the tolerance, and the same arg-max wherever the reference is clear about it.
void expect_logits(const Tensor& found, const std::vector<float>& expected, const std::string& what) {
  ASSERT_EQ(static_cast<size_t>(found.size()), expected.size()) << what;
  const Difference d = difference(found.f32(), expected);
  EXPECT_LE(d.worst, kLogitTolerance) << what << ": " << d;
  const int64_t vocab = found.dim(1);
  for (int64_t t = 0; t < found.dim(0); ++t) {
    const float* row = expected.data() + t * vocab;
    const int64_t best = std::max_element(row, row + vocab) - row;
    float second = -INFINITY;
    for (int64_t v = 0; v < vocab; ++v) second = v == best ? second : std::max(second, row[v]);
    if (row[best] - second <= kMargin) continue;
    const float* mine = found.f32() + t * vocab;
    EXPECT_EQ(std::max_element(mine, mine + vocab) - mine, best) << what << " row " << t;
  }
}

TEST(GoldenFull, prefill_logits_equal_the_vendors_within_1e3) {
  for (const std::string& p : prompt_names()) {
    expect_logits(all_logits(prompt(p), Numerics::kFull, 4096), fp32().floats(p + ".prefill.logits"), p);
  }
}

TEST(GoldenFull, chunks_of_1_3_and_16_give_the_bits_of_one_call) {
  for (Numerics numerics : {Numerics::kFull, Numerics::kKvq}) {
    for (const std::string& p : prompt_names()) {
      const Tensor whole = all_logits(prompt(p), numerics, 4096);
      for (int64_t chunk : {1, 3, 16}) {
        const Tensor cut = all_logits(prompt(p), numerics, chunk);
        EXPECT_EQ(std::memcmp(whole.data(), cut.data(), static_cast<size_t>(whole.size_bytes())), 0)
            << numerics_name(numerics) << " " << p << " in chunks of " << chunk;
      }
    }
  }
}

TEST(GoldenFull, decoding_equals_the_owner_variant) {
  for (const std::string& p : prompt_names()) {
    SequenceState state(tiny_model()->config());
    ForwardOptions o;
    o.numerics = Numerics::kFull;
    must_forward(state, prompt(p), o);
    Tensor logits(DType::kF32, {24, 512});
    const std::vector<int32_t> fed =
        common().has(p + ".tokens") ? fp32().ids(p + ".decode.owner.tokens") : std::vector<int32_t>{};
    ASSERT_EQ(fed.size(), 24u);
    for (size_t i = 0; i < fed.size(); ++i) {
      const ForwardResult r = must_forward(state, {&fed[i], 1}, o);
      std::copy_n(r.logits.f32(), 512, logits.f32() + i * 512);
    }
    expect_logits(logits, fp32().floats(p + ".decode.owner.logits"), p + " decode");
  }
  for (const std::string p : {"p17", "p40"}) {
    expect_logits(all_logits(prompt(p), Numerics::kFull, 1), fp32().floats(p + ".stepwise.owner.logits"),
                  p + " stepwise");
  }
}

TEST(GoldenKvq, rows_agree_except_for_single_code_flips) {
  int64_t rows = 0;
  int64_t agreeing = 0;
  for (const std::string& p : prompt_names()) {
    const std::vector<float> expected = fp32kvq().floats(p + ".prefill.logits");
    const Tensor found = all_logits(prompt(p), Numerics::kKvq, 4096);
    const int64_t vocab = found.dim(1);
    std::vector<float> errors;
    for (int64_t t = 0; t < found.dim(0); ++t) {
      const float* a = found.f32() + t * vocab;
      const float* b = expected.data() + t * vocab;
      float worst = 0;
      for (int64_t v = 0; v < vocab; ++v) worst = std::max(worst, std::fabs(a[v] - b[v]));
      errors.push_back(worst);
      ++rows;
      if (std::max_element(a, a + vocab) - a == std::max_element(b, b + vocab) - b) ++agreeing;
      if (worst > 1e-2f)
        std::cout << "kvq " << p << " row " << t << ": a code flipped, worst logit difference " << worst << "\n";
    }
    std::sort(errors.begin(), errors.end());
    const float median = errors[errors.size() / 2];
    std::cout << "kvq " << p << ": median row error " << median << ", worst " << errors.back() << "\n";
    EXPECT_LE(median, 1e-3f) << p;
  }
  std::cout << "kvq arg-max agreement " << agreeing << " of " << rows << "\n";
  EXPECT_GE(static_cast<double>(agreeing), 0.97 * static_cast<double>(rows));
}

}  // namespace
}  // namespace espalier
