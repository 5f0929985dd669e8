#include "codec/quantizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/rng.h"
#include "tests/unit/codec/golden.h"

namespace espalier::codec {
namespace {

using ::testing::HasSubstr;

double gaussian(const CounterRng& rng, uint64_t i) {
  return std::sqrt(-2 * std::log(1 - rng.uniform(2 * i))) * std::cos(6.283185307179586 * rng.uniform(2 * i + 1));
}

struct Problem {
  int64_t k, n;
  std::vector<float> weight;
  std::vector<double> hessian;
};

// Gaussian weights with uneven rows and columns; inputs with uneven channels.
Problem make_problem(int64_t k, int64_t n, uint64_t seed) {
  const CounterRng rng(seed, "problem");
  Problem p{k, n, {}, {}};
  p.weight.resize(static_cast<size_t>(k * n));
  for (int64_t i = 0; i < k * n; ++i) {
    const double row = std::exp(0.3 * gaussian(rng, 500000 + static_cast<uint64_t>(i / n)));
    const double column = std::exp(0.3 * gaussian(rng, 600000 + static_cast<uint64_t>(i % n)));
    p.weight[static_cast<size_t>(i)] = static_cast<float>(0.02 * gaussian(rng, static_cast<uint64_t>(i)) * row * column);
  }
  std::vector<float> x(static_cast<size_t>(2 * k * k));
  for (size_t i = 0; i < x.size(); ++i) {
    const double channel = std::exp(0.5 * gaussian(rng, 700000 + i % static_cast<size_t>(k)));
    x[i] = static_cast<float>(gaussian(rng, 1000000 + i) * channel);
  }
  p.hessian = golden::hessian_of(x, k);
  return p;
}

Result<QuantizedMatrix> quantize(const Problem& p, const QuantizeOptions& options, int n_threads = 2, bool use_hessian = true) {
  ThreadPool pool(n_threads);
  return quantize_matrix(p.weight.data(), p.k, p.n, use_hessian ? p.hessian.data() : nullptr, options, pool);
}

void expect_same_bytes(const Exl3Tensor& a, const Exl3Tensor& b, const std::string& what) {
  EXPECT_EQ(a.trellis, b.trellis) << what;
  EXPECT_EQ(a.suh, b.suh) << what;
  EXPECT_EQ(a.svh, b.svh) << what;
}

void expect_golden_quality(const std::vector<std::filesystem::path>& files, double bound, int n_expected) {
  ThreadPool pool(2);
  double log_ratio = 0;
  int n_cases = 0;
  for (const std::filesystem::path& path : files) {
    const SafetensorsFile file = golden::open(path);
    for (const golden::Case& c : golden::cases(file)) {
      if (c.hessian.empty()) continue;
      const ErrorMeasures recorded = measure_error(c.weight.data(), c.decoded.data(), c.k, c.n, c.hessian.data(), pool);
      double mean = 0;
      for (uint64_t seed = 0; seed < 5; ++seed) {
        QuantizeOptions options;
        options.k2 = c.k2;
        options.codebook = c.codebook;
        options.seed = seed;
        options.name = c.name;
        const Result<QuantizedMatrix> r = quantize_matrix(c.weight.data(), c.k, c.n, c.hessian.data(), options, pool);
        ASSERT_TRUE(r.ok()) << r.error().message();
        mean += r->true_error / 5;
      }
      log_ratio += std::log(mean / recorded.true_error);
      ++n_cases;
    }
  }
  EXPECT_EQ(n_cases, n_expected);
  const double ratio = std::exp(log_ratio / n_cases);
  std::printf("true error against exllamav3's, geometric mean of %d golden cases, 5 seeds each: %.4f\n", n_cases, ratio);
  EXPECT_LE(ratio, bound);
  EXPECT_GE(ratio, 0.2) << "too good: the error is not measured on the stored tensor";
}

// Required: at most 1.01 times exllamav3's recorded error. Reached: about 0.41 over all 24 cases.
TEST(Quantizer, golden_cases_are_closer_than_exllamav3s) {
  const std::filesystem::path larger = golden::shared_file("mul1_larger.safetensors");
  const std::filesystem::path other = golden::shared_file("other_and_special.safetensors");
  if (std::filesystem::exists(larger) && std::filesystem::exists(other)) {
    expect_golden_quality({golden::tree_file("mul1_128.safetensors"), larger, other}, 0.48, 24);
  } else {
    std::printf("%s and its neighbour are not here; only the 7 tracked cases were measured\n", larger.c_str());
    expect_golden_quality({golden::tree_file("mul1_128.safetensors")}, 0.70, 7);
  }
}

TEST(Quantizer, reported_errors_are_those_of_the_stored_tensor) {
  const Problem p = make_problem(128, 256, 1);
  const QuantizedMatrix q = quantize(p, {}).value();
  ThreadPool pool(1);
  std::vector<float> decoded(p.weight.size());
  decode_weight(q.tensor.view(), decoded.data(), pool);
  double error_h = 0, weight_h = 0, error = 0, weight = 0;
  for (int64_t j = 0; j < p.n; ++j) {
    for (int64_t a = 0; a < p.k; ++a) {
      const double wa = p.weight[static_cast<size_t>(a * p.n + j)];
      const double ea = wa - double{decoded[static_cast<size_t>(a * p.n + j)]};
      error += ea * ea;
      weight += wa * wa;
      for (int64_t b = 0; b < p.k; ++b) {
        const double h = p.hessian[static_cast<size_t>(a * p.k + b)];
        const double wb = p.weight[static_cast<size_t>(b * p.n + j)];
        error_h += ea * h * (wb - double{decoded[static_cast<size_t>(b * p.n + j)]});
        weight_h += wa * h * wb;
      }
    }
  }
  EXPECT_NEAR(q.true_error, error_h / weight_h, 1e-9 * q.true_error);
  EXPECT_NEAR(q.relative_mse, error / weight, 1e-9 * q.relative_mse);
  EXPECT_EQ(q.hessian, HessianUse::kCalibrated);
  EXPECT_EQ(q.damping, 0.025);
}

TEST(Quantizer, threads_tiers_and_repetition_give_the_same_bytes) {
  const Problem p = make_problem(128, 256, 2);
  for (int k2 : {4, 5, 6, 12}) {
    QuantizeOptions options;
    options.k2 = k2;
    const QuantizedMatrix expected = quantize(p, options, 1).value();
    for (int n_threads : {1, 2, 3}) {
      const QuantizedMatrix q = quantize(p, options, n_threads).value();
      expect_same_bytes(q.tensor, expected.tensor, std::to_string(n_threads) + " threads");
      EXPECT_EQ(q.true_error, expected.true_error);
    }
    for (SimdTier tier : usable_simd_tiers()) {
      options.tier = tier;
      expect_same_bytes(quantize(p, options).value().tensor, expected.tensor, std::string(simd_tier_name(tier)));
    }
  }
}

TEST(Quantizer, columns_do_not_depend_on_their_neighbours_threads) {
  // The same matrix encoded twice in one pool and once alone: nothing is left over between calls.
  const Problem a = make_problem(128, 128, 3);
  const Problem b = make_problem(256, 128, 4);
  ThreadPool pool(2);
  const auto run = [&](const Problem& p) { return quantize_matrix(p.weight.data(), p.k, p.n, p.hessian.data(), {}, pool).value().tensor; };
  const Exl3Tensor first = run(a);
  run(b);
  expect_same_bytes(run(a), first, "after another matrix");
  expect_same_bytes(quantize(a, {}, 1).value().tensor, first, "alone");
}

TEST(Quantizer, seed_and_name_choose_the_signs) {
  const Problem p = make_problem(128, 128, 5);
  const auto signs = [&](uint64_t seed, const std::string& name) {
    QuantizeOptions options;
    options.seed = seed;
    options.name = name;
    const Exl3Tensor t = quantize(p, options).value().tensor;
    std::vector<bool> out;
    for (uint16_t s : t.suh) out.push_back((s & 0x8000) != 0);
    for (uint16_t s : t.svh) out.push_back((s & 0x8000) != 0);
    return out;
  };
  EXPECT_EQ(signs(1, "a"), signs(1, "a"));
  EXPECT_NE(signs(1, "a"), signs(2, "a"));
  EXPECT_NE(signs(1, "a"), signs(1, "b"));
  const std::vector<bool> s = signs(1, "a");
  const long n_negative = std::count(s.begin(), s.end(), true);
  EXPECT_GT(n_negative, 90);  // 128 expected of 256, standard deviation 8
  EXPECT_LT(n_negative, 166);
}

TEST(Quantizer, error_falls_about_fourfold_per_bit) {
  const Problem p = make_problem(256, 128, 6);
  double before = 0;
  for (int width = 1; width <= 8; ++width) {
    QuantizeOptions options;
    options.k2 = 2 * width;
    const double error = quantize(p, options).value().true_error;
    if (width > 1) {
      EXPECT_GT(before / error, 3.0) << "K = " << width;
      EXPECT_LT(before / error, 5.5) << "K = " << width;
    }
    before = error;
  }
}

TEST(Quantizer, power_of_two_scale_of_the_hessian_does_not_matter) {
  Problem p = make_problem(128, 128, 7);
  const QuantizedMatrix expected = quantize(p, {}).value();
  for (double scale : {0x1.0p-80, 0x1.0p60}) {
    Problem scaled = p;
    for (double& h : scaled.hessian) h *= scale;
    const QuantizedMatrix q = quantize(scaled, {}).value();
    expect_same_bytes(q.tensor, expected.tensor, std::to_string(scale));
    EXPECT_NEAR(q.true_error, expected.true_error, 1e-12);
  }
}

TEST(Quantizer, the_hessian_is_worth_using) {
  const Problem p = make_problem(256, 128, 8);
  const QuantizedMatrix with = quantize(p, {}).value();
  const QuantizedMatrix without = quantize(p, {}, 2, false).value();
  EXPECT_EQ(without.hessian, HessianUse::kNone);
  EXPECT_EQ(without.true_error, without.relative_mse);
  ThreadPool pool(1);
  std::vector<float> decoded(p.weight.size());
  decode_weight(without.tensor.view(), decoded.data(), pool);
  EXPECT_LT(with.true_error, 0.9 * measure_error(p.weight.data(), decoded.data(), p.k, p.n, p.hessian.data(), pool).true_error);
  EXPECT_LT(without.relative_mse, with.relative_mse);
}

TEST(Quantizer, an_empty_hessian_is_recorded_and_treated_as_none) {
  Problem p = make_problem(128, 128, 9);
  const QuantizedMatrix none = quantize(p, {}, 1, false).value();
  std::fill(p.hessian.begin(), p.hessian.end(), 0.0);
  const QuantizedMatrix empty = quantize(p, {}).value();
  EXPECT_EQ(empty.hessian, HessianUse::kEmpty);
  expect_same_bytes(empty.tensor, none.tensor, "empty");
}

TEST(Quantizer, rank_deficient_hessian_and_dead_inputs_work) {
  Problem p = make_problem(128, 128, 10);
  std::vector<float> x(3 * 128);
  for (size_t i = 0; i < x.size(); ++i) x[i] = i % 128 < 100 ? std::sin(static_cast<float>(i)) : 0.0f;  // 28 channels never active
  p.hessian = golden::hessian_of(x, 128);
  const QuantizedMatrix q = quantize(p, {}).value();
  EXPECT_LT(q.true_error, 0.01);
  EXPECT_LT(q.relative_mse, 0.3);
}

TEST(Quantizer, zero_rows_and_columns_decode_to_exact_zeros) {
  Problem p = make_problem(256, 256, 11);
  for (int64_t i = 0; i < 256; ++i) {
    p.weight[static_cast<size_t>(i * 256 + 5)] = 0;
    p.weight[static_cast<size_t>(i * 256 + 255)] = 0;
    p.weight[static_cast<size_t>(17 * 256 + i)] = 0;
    for (int64_t r = 128; r < 256; ++r) p.weight[static_cast<size_t>(r * 256 + i)] = 0;  // a whole block
  }
  const QuantizedMatrix q = quantize(p, {}).value();
  EXPECT_EQ(q.n_zero_columns, 2);
  EXPECT_EQ(q.n_zero_rows, 129);
  EXPECT_EQ(q.tensor.svh[5] & 0x7FFF, 0);
  EXPECT_EQ(q.tensor.suh[17] & 0x7FFF, 0);
  ThreadPool pool(1);
  std::vector<float> decoded(p.weight.size());
  decode_weight(q.tensor.view(), decoded.data(), pool);
  for (size_t i = 0; i < decoded.size(); ++i) {
    if (p.weight[i] == 0 && (i % 256 == 5 || i % 256 == 255 || i / 256 == 17 || i / 256 >= 128)) {
      ASSERT_EQ(decoded[i], 0.0f) << i;
    }
  }
  EXPECT_LT(q.true_error, 0.02);
}

TEST(Quantizer, a_zero_matrix_decodes_to_zero) {
  Problem p = make_problem(128, 128, 12);
  std::fill(p.weight.begin(), p.weight.end(), 0.0f);
  const QuantizedMatrix q = quantize(p, {}).value();
  EXPECT_EQ(q.true_error, 0.0);
  EXPECT_EQ(q.n_zero_rows, 128);
  ThreadPool pool(1);
  std::vector<float> decoded(p.weight.size(), 1.0f);
  decode_weight(q.tensor.view(), decoded.data(), pool);
  for (float v : decoded) ASSERT_EQ(v, 0.0f);
}

TEST(Quantizer, tiny_and_huge_weights_keep_their_accuracy_and_finite_scales) {
  const Problem p = make_problem(128, 128, 13);
  const double expected = quantize(p, {}).value().true_error;
  for (float scale : {0x1.0p-26f, 0x1.0p-12f, 0x1.0p10f, 0x1.0p20f}) {
    Problem scaled = p;
    for (float& w : scaled.weight) w *= scale;
    const QuantizedMatrix q = quantize(scaled, {}).value();
    EXPECT_NEAR(q.true_error, expected, 0.02 * expected) << scale;
    for (uint16_t s : q.tensor.suh) EXPECT_LT(s & 0x7FFF, 0x7C00);
    for (uint16_t s : q.tensor.svh) EXPECT_LT(s & 0x7FFF, 0x7C00);
  }
}

struct Refusal {
  std::string what;
  StatusCode code;
  std::vector<std::string> words;
};

void expect_refused(const Result<QuantizedMatrix>& r, const Refusal& expected) {
  ASSERT_FALSE(r.ok()) << expected.what;
  EXPECT_EQ(r.error().code(), expected.code) << r.error().message();
  EXPECT_THAT(r.error().message(), HasSubstr("layers.7.up"));
  for (const std::string& word : expected.words) EXPECT_THAT(r.error().message(), HasSubstr(word));
}

TEST(Quantizer, bad_input_is_refused_by_name_and_place) {
  const Problem good = make_problem(128, 128, 14);
  QuantizeOptions options;
  options.name = "layers.7.up";
  ThreadPool pool(1);
  const float infinity = std::numeric_limits<float>::infinity();
  {
    Problem p = good;
    p.weight[3 * 128 + 9] = std::numeric_limits<float>::quiet_NaN();
    expect_refused(quantize(p, options), {"NaN weight", StatusCode::kDataLoss, {"[3, 9]", "NaN"}});
    p.weight[3 * 128 + 9] = -infinity;
    expect_refused(quantize(p, options), {"infinite weight", StatusCode::kDataLoss, {"[3, 9]", "infinite"}});
  }
  {
    Problem p = good;
    p.hessian[2 * 128 + 64] = std::numeric_limits<double>::quiet_NaN();
    expect_refused(quantize(p, options), {"NaN Hessian", StatusCode::kDataLoss, {"Hessian[2, 64]"}});
    p.hessian[2 * 128 + 64] = 0;
    p.hessian[5 * 128 + 5] = -1;
    expect_refused(quantize(p, options), {"negative diagonal", StatusCode::kDataLoss, {"Hessian[5, 5]"}});
  }
  {
    Problem p = good;
    for (int64_t i = 0; i < 128; ++i) {
      for (int64_t j = 0; j < 128; ++j) p.hessian[static_cast<size_t>(i * 128 + j)] = i == j ? 1.0 : -1.0;
    }
    expect_refused(quantize(p, options), {"indefinite Hessian", StatusCode::kFailedPrecondition, {"positive definite"}});
  }
  {
    Problem p = good;
    for (float& w : p.weight) w *= 1e30f;
    expect_refused(quantize(p, options), {"too large", StatusCode::kFailedPrecondition, {"too large", "65504"}});
  }
  for (const auto& [k, n] : {std::pair<int64_t, int64_t>{64, 128}, {128, 200}, {0, 128}}) {
    expect_refused(quantize_matrix(good.weight.data(), k, n, nullptr, options, pool),
                   {"dimensions", StatusCode::kFailedPrecondition, {"128", std::to_string(n)}});
  }
  options.k2 = 18;
  expect_refused(quantize(good, options), {"width", StatusCode::kInvalidArgument, {"18"}});
  options.k2 = 5;
  options.codebook = Codebook::kMcg;
  expect_refused(quantize(good, options), {"half step", StatusCode::kInvalidArgument, {"2.5", "mcg", "mul1"}});
  options.codebook = Codebook::kMul1;
  options.k2 = 6;
  options.n_cuts = 3;
  expect_refused(quantize(good, options), {"cuts", StatusCode::kInvalidArgument, {"3"}});
}

TEST(Quantizer, presets_have_names) {
  for (Preset preset : {Preset::kFast, Preset::kBest}) EXPECT_EQ(preset_from_name(preset_name(preset)), preset);
  EXPECT_EQ(preset_from_name("medium"), std::nullopt);
}

TEST(Quantizer, an_almost_singular_hessian_is_damped_further_and_says_so) {
  Problem p = make_problem(128, 128, 15);
  for (int64_t i = 0; i < 128; ++i) {
    for (int64_t j = 0; j < 128; ++j) p.hessian[static_cast<size_t>(i * 128 + j)] = i == j ? 1.0 : i + j == 127 ? -1.08 : 0.0;
  }
  const QuantizedMatrix q = quantize(p, {}).value();
  EXPECT_GT(q.damping, 0.08);
  EXPECT_LT(q.damping, 0.2);
}

}  // namespace
}  // namespace espalier::codec
