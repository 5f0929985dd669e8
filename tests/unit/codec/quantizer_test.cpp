#include "codec/quantizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/rng.h"
#include "bench/peer/golden_cases.h"

namespace espalier::codec {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
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

// Geometric mean of the true error over exllamav3's recorded one, over the `n_expected` cases of at most so many weights.
void expect_golden_quality(Preset preset, double bound, int64_t most_weights, int n_expected) {
  const std::filesystem::path larger = golden::shared_file("mul1_larger.safetensors");
  const std::filesystem::path other = golden::shared_file("other_and_special.safetensors");
  std::vector<std::filesystem::path> files = {golden::tree_file("mul1_128.safetensors")};
  const bool all = std::filesystem::exists(larger) && std::filesystem::exists(other);
  if (all) {
    files.push_back(larger);
    files.push_back(other);
  } else {
    std::printf("%s and its neighbour are not here; only the 7 tracked cases were measured\n", larger.c_str());
  }
  ThreadPool pool(2);
  double log_ratio = 0;
  int n_cases = 0;
  for (const std::filesystem::path& path : files) {
    const SafetensorsFile file = golden::open(path);
    for (const golden::Case& c : golden::cases(file)) {
      if (c.hessian.empty() || c.k * c.n > most_weights) continue;
      const ErrorMeasures recorded = measure_error(c.weight.data(), c.decoded.data(), c.k, c.n, c.hessian.data(), pool);
      QuantizeOptions options = quantize_preset(preset);
      options.k2 = c.k2;
      options.codebook = c.codebook;
      options.name = c.name;
      const Result<QuantizedMatrix> r = quantize_matrix(c.weight.data(), c.k, c.n, c.hessian.data(), options, pool);
      ASSERT_TRUE(r.ok()) << r.error().message();
      log_ratio += std::log(r->true_error / recorded.true_error);
      ++n_cases;
    }
  }
  EXPECT_EQ(n_cases, all ? n_expected : 7);
  const double ratio = std::exp(log_ratio / n_cases);
  std::printf("%s: true error against exllamav3's, geometric mean of %d golden cases: %.4f\n",
              std::string(preset_name(preset)).c_str(), n_cases, ratio);
  EXPECT_LE(ratio, all ? bound : 0.70);
  EXPECT_GE(ratio, 0.2) << "too good: the error is not measured on the stored tensor";
}

// The bounds are what is asked for over all 24 cases; bench/exl3_quality measures both presets there with more seeds. `best`
// takes several times as long, so here it has all but the 4 largest.
TEST(Quantizer, golden_cases_are_closer_than_exllamav3s_with_fast) {
  expect_golden_quality(Preset::kFast, 0.48, 640 * 256, 24);
}
TEST(Quantizer, golden_cases_are_closer_than_exllamav3s_with_best) {
  expect_golden_quality(Preset::kBest, 0.42, 128 * 256, 20);
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

// Every option that changes the bytes at once, and a matrix with fewer column groups than threads.
TEST(Quantizer, threads_and_tiers_give_the_same_bytes_with_every_option_on) {
  const Problem p = make_problem(128, 256, 21);
  const CounterRng rng(3, "metric");
  std::vector<double> diagonal(256), full(256 * 256);
  for (size_t j = 0; j < 256; ++j) {
    diagonal[j] = 0.1 + rng.uniform(j);
    for (size_t l = 0; l < 256; ++l) full[j * 256 + l] = (j == l ? 1.0 : 0.0) + 0.3 * std::cos(0.1 * static_cast<double>(j)) * std::cos(0.1 * static_cast<double>(l));
  }
  for (int variant = 0; variant < 3; ++variant) {
    QuantizeOptions options;
    options.k2 = 5;
    options.descent_sweeps = 1;
    options.refit_rounds = 2;
    options.n_draws = variant == 0 ? 2 : 1;
    options.n_cuts = variant == 1 ? 2 : 1;
    options.spread_tiles = 4;
    options.two_sided = variant != 0;
    options.output.diagonal = variant == 0 ? nullptr : variant == 1 ? diagonal.data() : nullptr;
    options.output.full = variant == 2 ? full.data() : nullptr;
    const QuantizedMatrix expected = quantize(p, options, 1).value();
    for (int n_threads : {2, 3}) {
      const QuantizedMatrix q = quantize(p, options, n_threads).value();
      expect_same_bytes(q.tensor, expected.tensor, std::to_string(n_threads) + " threads, variant " + std::to_string(variant));
      EXPECT_EQ(q.true_error, expected.true_error);
    }
    if (usable_simd_tiers().size() > 2) {
      options.tier = SimdTier::kAvx2;
      expect_same_bytes(quantize(p, options).value().tensor, expected.tensor, "avx2, variant " + std::to_string(variant));
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

TEST(Quantizer, feedback_along_the_outputs_pays_when_columns_are_uneven) {
  const Problem p = make_problem(256, 256, 22);  // columns of log-std 0.3
  QuantizeOptions options;
  const double two = quantize(p, options).value().true_error;
  options.two_sided = false;
  const double one = quantize(p, options).value().true_error;
  EXPECT_LT(two, 0.97 * one);
}

TEST(Quantizer, an_output_metric_moves_error_to_where_it_counts_less) {
  const Problem p = make_problem(128, 256, 23);
  const CounterRng rng(4, "metric");
  std::vector<double> diagonal(256);
  for (size_t j = 0; j < 256; ++j) diagonal[j] = std::exp(1.5 * gaussian(rng, j));
  ThreadPool pool(2);
  const auto weighted = [&](const QuantizedMatrix& q) {  // by hand, from the stored tensor
    std::vector<float> decoded(p.weight.size());
    decode_weight(q.tensor.view(), decoded.data(), pool);
    double error = 0, power = 0;
    for (int64_t j = 0; j < p.n; ++j) {
      for (int64_t a = 0; a < p.k; ++a) {
        for (int64_t b = 0; b < p.k; ++b) {
          const double h = p.hessian[static_cast<size_t>(a * p.k + b)] * diagonal[static_cast<size_t>(j)];
          const auto at = static_cast<size_t>(a * p.n + j), bt = static_cast<size_t>(b * p.n + j);
          error += h * (double{p.weight[at]} - double{decoded[at]}) * (double{p.weight[bt]} - double{decoded[bt]});
          power += h * double{p.weight[at]} * double{p.weight[bt]};
        }
      }
    }
    return error / power;
  };
  QuantizeOptions options;
  const double without = weighted(quantize(p, options).value());
  options.output.diagonal = diagonal.data();
  const QuantizedMatrix with = quantize(p, options).value();
  EXPECT_NEAR(with.weighted_error, weighted(with), 1e-9 * with.weighted_error);
  EXPECT_LT(with.weighted_error, 0.85 * without);

  // The same metric written as a full matrix: the same trellis (refit solves another system, so it is left out).
  std::vector<double> full(256 * 256);
  for (size_t j = 0; j < 256; ++j) full[j * 256 + j] = diagonal[j];
  options.refit_rounds = 0;
  const QuantizedMatrix of_diagonal = quantize(p, options).value();
  options.output = {nullptr, full.data()};
  const QuantizedMatrix of_full = quantize(p, options).value();
  expect_same_bytes(of_full.tensor, of_diagonal.tensor, "full and diagonal");
  options.refit_rounds = 1;
  EXPECT_NEAR(quantize(p, options).value().weighted_error, with.weighted_error, 0.002 * with.weighted_error);
}

TEST(Quantizer, more_effort_never_ends_with_a_larger_error) {
  const Problem p = make_problem(128, 128, 24);
  QuantizeOptions options;
  options.refit_rounds = 0;
  double before = quantize(p, options).value().true_error;
  for (int rounds : {1, 2}) {  // refit minimises the damped error; what is kept has the smaller raw one
    options.refit_rounds = rounds;
    const double now = quantize(p, options).value().true_error;
    EXPECT_LT(now, 1.001 * before);
    before = now;
  }
  for (int draws : {2, 4}) {
    options.n_draws = draws;
    const QuantizedMatrix q = quantize(p, options).value();
    EXPECT_LE(q.true_error, before);
    EXPECT_LT(q.draw, draws);
    before = q.true_error;
  }
  const double one_sweep = [&] {
    options.descent_sweeps = 1;
    return quantize(p, options).value().true_error;
  }();
  EXPECT_LT(one_sweep, before);
}

std::vector<std::string> reasons(const QuantizedMatrix& q) {
  std::vector<std::string> out;
  for (const Fallback& f : q.fallbacks) out.push_back(f.reason + "/" + std::to_string(f.count) + "/" + std::to_string(f.first));
  return out;
}

TEST(Quantizer, fallbacks_are_recorded_with_reason_count_and_place) {
  const Problem good = make_problem(128, 128, 25);
  EXPECT_THAT(reasons(quantize(good, {}).value()), ::testing::IsEmpty());
  EXPECT_THAT(reasons(quantize(good, {}, 1, false).value()), ElementsAre("no Hessian: all inputs count the same/0/-1"));
  {
    Problem p = good;
    std::fill(p.hessian.begin(), p.hessian.end(), 0.0);
    EXPECT_THAT(reasons(quantize(p, {}).value()), ElementsAre("Hessian of zeros: all inputs count the same/0/-1"));
  }
  {
    Problem p = good;  // inputs 7 and 40 never active, input 9 and output 3 without weights
    for (int64_t i = 0; i < 128; ++i) {
      for (int64_t dead : {7, 40}) p.hessian[static_cast<size_t>(dead * 128 + i)] = p.hessian[static_cast<size_t>(i * 128 + dead)] = 0;
      p.weight[static_cast<size_t>(9 * 128 + i)] = p.weight[static_cast<size_t>(i * 128 + 3)] = 0;
    }
    const QuantizedMatrix q = quantize(p, {}).value();
    EXPECT_THAT(reasons(q), ElementsAre("inputs without calibration activity: weighed by damping alone/2/7",
                                        "inputs without weights: scale 0/1/9", "outputs without weights: scale 0/1/3"));
    EXPECT_LT(q.relative_mse, 0.1) << "dead inputs are still encoded";
  }
  {
    Problem p = good;
    for (int64_t i = 0; i < 128; ++i) {
      for (int64_t j = 0; j < 128; ++j) p.hessian[static_cast<size_t>(i * 128 + j)] = i == j ? 1.0 : i + j == 127 ? -1.08 : 0.0;
    }
    EXPECT_THAT(reasons(quantize(p, {}).value()), ElementsAre("Hessian not positive definite: damping raised/0/-1"));
  }
}

TEST(Quantizer, weights_beyond_fp16_scales_are_refused_or_stored_as_zeros_and_say_so) {
  const Problem good = make_problem(128, 128, 26);
  QuantizeOptions options;
  options.name = "layers.7.up";
  {
    Problem p = good;  // all subnormal: no product of two fp16 scales is that small
    for (float& w : p.weight) w *= 1e-40f;
    const QuantizedMatrix q = quantize(p, options).value();
    EXPECT_THAT(reasons(q), ElementsAre("weights below the range of fp16 scales: stored as zeros/0/-1"));
    EXPECT_EQ(q.true_error, 1.0);
  }
  {
    Problem p = good;  // columns 5 and 6 far below the rest
    for (int64_t i = 0; i < 128; ++i) {
      for (int64_t j : {5, 6}) p.weight[static_cast<size_t>(i * 128 + j)] *= 1e-20f;
    }
    const QuantizedMatrix q = quantize(p, options).value();
    EXPECT_THAT(reasons(q), ElementsAre("output scales below the range of fp16: columns stored as zeros/2/5"));
    EXPECT_LT(q.true_error, 0.02);
  }
  {
    Problem p = good;  // one damaged value
    p.weight[3 * 128 + 9] = 1e30f;
    const Result<QuantizedMatrix> r = quantize(p, options);
    ASSERT_FALSE(r.ok());
    EXPECT_THAT(r.error().message(), AllOf(HasSubstr("layers.7.up"), HasSubstr("[3, 9]"), HasSubstr("1e+30")));
  }
}

TEST(Quantizer, huge_and_tiny_hessians_are_used_as_they_are) {
  const Problem p = make_problem(128, 128, 27);
  const Exl3Tensor expected = quantize(p, {}).value().tensor;
  for (double scale : {0x1.0p1015, 0x1.0p-1000}) {
    Problem scaled = p;
    for (double& h : scaled.hessian) h *= scale;
    expect_same_bytes(quantize(scaled, {}).value().tensor, expected, std::to_string(std::log2(scale)));
  }
}

TEST(Quantizer, bad_output_metrics_are_refused) {
  const Problem p = make_problem(128, 128, 28);
  QuantizeOptions options;
  options.name = "layers.7.up";
  std::vector<double> diagonal(128, 1.0);
  options.output.diagonal = diagonal.data();
  const auto message = [&] {
    const Result<QuantizedMatrix> r = quantize(p, options);
    return r.ok() ? std::string("accepted") : r.error().message();
  };
  diagonal[17] = -1;
  EXPECT_THAT(message(), AllOf(HasSubstr("layers.7.up"), HasSubstr("output 17"), HasSubstr("negative")));
  diagonal[17] = std::numeric_limits<double>::infinity();
  EXPECT_THAT(message(), AllOf(HasSubstr("layers.7.up"), HasSubstr("17"), HasSubstr("not finite")));
  std::fill(diagonal.begin(), diagonal.end(), 0.0);
  EXPECT_THAT(message(), AllOf(HasSubstr("layers.7.up"), HasSubstr("zero")));
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
