#include "stages/quantize/hessian.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "base/rng.h"
#include "base/simd_tier.h"

namespace espalier {
namespace {

std::vector<float> random_rows(int64_t n, int64_t k, const char* name) {
  const CounterRng rng(7, name);
  std::vector<float> x(static_cast<size_t>(n * k));
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(2 * rng.uniform(i) - 1);
  return x;
}

// The definition, in plain loops: chunks of 1,024 rows, fp32 FMA chains, fp64 sum over chunks.
std::vector<double> by_definition(const std::vector<float>& x, int64_t n, int64_t k, const std::vector<float>& scale) {
  std::vector<double> sum(static_cast<size_t>(k * k));
  for (int64_t begin = 0; begin < n; begin += 1024) {
    for (int64_t i = 0; i < k; ++i) {
      for (int64_t j = 0; j < k; ++j) {
        float acc = 0;
        for (int64_t t = begin; t < std::min(n, begin + 1024); ++t) {
          const float s = scale.empty() ? 1.0f : scale[static_cast<size_t>(t)];
          acc = std::fma(s * x[static_cast<size_t>(t * k + i)], s * x[static_cast<size_t>(t * k + j)], acc);
        }
        sum[static_cast<size_t>(i * k + j)] += static_cast<double>(acc);
      }
    }
  }
  return sum;
}

TEST(Hessian, equals_its_definition_bit_for_bit_at_awkward_sizes) {
  ThreadPool pool(2);
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{1, 32}, {7, 40}, {1024, 64}, {1025, 48}, {2300, 33}}) {
    const std::vector<float> x = random_rows(n, k, "x");
    HessianAccumulator accumulator(k);
    accumulator.add(pool, x.data(), n);
    const Hessian h = accumulator.finish(pool);
    EXPECT_EQ(h.sum, by_definition(x, n, k, {})) << n << " x " << k;
    EXPECT_EQ(h.rows, n);
    EXPECT_EQ(h.weight_sum, static_cast<double>(n));
  }
}

TEST(Hessian, a_row_of_scale_s_weighs_s_squared) {
  ThreadPool pool(2);
  const int64_t n = 1100, k = 48;
  const std::vector<float> x = random_rows(n, k, "x");
  std::vector<float> scale = random_rows(n, 1, "scale");
  for (float& s : scale) s = std::fabs(s);
  HessianAccumulator accumulator(k);
  accumulator.add(pool, x.data(), n, scale.data());
  const Hessian h = accumulator.finish(pool);
  EXPECT_EQ(h.sum, by_definition(x, n, k, scale));
  double w = 0, w2 = 0;
  for (float s : scale) {
    const double v = static_cast<double>(s) * static_cast<double>(s);
    w += v;
    w2 += v * v;
  }
  EXPECT_DOUBLE_EQ(h.weight_sum, w);
  EXPECT_DOUBLE_EQ(h.effective_rows(), w * w / w2);
}

TEST(Hessian, bytes_do_not_depend_on_how_rows_arrive_on_threads_or_on_the_simd_tier) {
  const int64_t n = 2500, k = 128;
  const std::vector<float> x = random_rows(n, k, "x");
  ThreadPool two(2);
  HessianAccumulator whole(k);
  whole.add(two, x.data(), n);
  const std::vector<double> expected = whole.finish(two).sum;
  ThreadPool one(1);
  for (SimdTier tier : usable_simd_tiers()) {
    ASSERT_TRUE(set_simd_tier(tier));
    HessianAccumulator pieces(k);
    for (int64_t at = 0; at < n;) {
      const int64_t m = std::min<int64_t>(n - at, 1 + at % 700);
      pieces.add(one, x.data() + at * k, m);
      at += m;
    }
    EXPECT_EQ(pieces.finish(one).sum, expected) << simd_tier_name(tier);
  }
  reset_simd_tier();
}

TEST(Hessian, rows_with_a_non_finite_entry_are_dropped_and_counted) {
  ThreadPool pool(1);
  std::vector<float> x = random_rows(10, 32, "x");
  std::vector<float> clean;
  for (int64_t t = 0; t < 10; ++t) {
    if (t != 3 && t != 8) clean.insert(clean.end(), x.begin() + t * 32, x.begin() + (t + 1) * 32);
  }
  x[3 * 32 + 5] = std::numeric_limits<float>::quiet_NaN();
  x[8 * 32] = -std::numeric_limits<float>::infinity();
  HessianAccumulator accumulator(32);
  accumulator.add(pool, x.data(), 10);
  const Hessian h = accumulator.finish(pool);
  EXPECT_EQ(h.rows, 8);
  EXPECT_EQ(h.dropped, 2);
  EXPECT_EQ(h.sum, by_definition(clean, 8, 32, {}));
}

TEST(Hessian, the_prior_shrinks_by_effective_tokens_and_keeps_the_experts_scale) {
  ThreadPool pool(1);
  const int64_t k = 32;
  const std::vector<float> all = random_rows(500, k, "all");
  const std::vector<float> own = random_rows(20, k, "own");
  std::vector<float> scale(20, 2.0f);  // weight 4 each: n_eff stays 20
  HessianAccumulator a(k), b(k);
  a.add(pool, all.data(), 500);
  b.add(pool, own.data(), 20, scale.data());
  const HessianPrior prior = make_prior(a.finish(pool));
  const Hessian h = b.finish(pool);
  const double n0 = 60;
  const double s = h.trace() / 80 / prior.trace;
  const BlendedHessian blended = blend_with_prior(h, prior, n0);
  EXPECT_DOUBLE_EQ(blended.prior_fraction, 0.75);
  for (size_t i = 0; i < h.sum.size(); ++i) {
    EXPECT_NEAR(blended.values[i], (20 * h.sum[i] / 80 + n0 * s * prior.mean[i]) / 80, 1e-12);
  }
  double trace = 0;
  for (int64_t i = 0; i < k; ++i) trace += blended.values[static_cast<size_t>(i * k + i)];
  EXPECT_NEAR(trace, h.trace() / 80, 1e-9);
}

TEST(Hessian, fewer_effective_tokens_are_damped_more) {
  EXPECT_EQ(default_damping(1e9, 5120), 0.025);
  EXPECT_DOUBLE_EQ(default_damping(5120, 256), 0.1);
  EXPECT_EQ(default_damping(100, 256), 1.0);
  EXPECT_EQ(default_damping(0, 256), 1.0);  // the prior alone
}

TEST(Hessian, without_tokens_the_prior_stands_alone_and_without_prior_nothing_changes) {
  ThreadPool pool(1);
  const std::vector<float> all = random_rows(100, 32, "all");
  HessianAccumulator a(32), none(32), again(32);
  a.add(pool, all.data(), 100);
  const HessianPrior prior = make_prior(a.finish(pool));
  const BlendedHessian blended = blend_with_prior(none.finish(pool), prior, 10);
  EXPECT_EQ(blended.values, prior.mean);
  EXPECT_EQ(blended.prior_fraction, 1.0);
  again.add(pool, all.data(), 100);
  const Hessian h = again.finish(pool);
  EXPECT_EQ(blend_with_prior(h, prior, 0).values, h.sum);
  EXPECT_EQ(blend_with_prior(h, HessianPrior(), 10).values, h.sum);
}

}  // namespace
}  // namespace espalier
