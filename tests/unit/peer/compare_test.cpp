// The statistics of the comparison against values by hand and against the normal approximation.
#include "bench/peer/compare.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "base/rng.h"

namespace espalier::peer {
namespace {

TEST(Compare, errors_are_compared_by_the_geometric_mean_of_ratios) {
  const std::vector<double> peer = {1, 2, 4, 8}, ours = {0.5, 4, 1, 8};
  const ErrorComparison c = compare_errors(peer, ours);  // ratios 1/2, 2, 1/4, 1
  EXPECT_NEAR(c.ratio, std::pow(0.25, 0.25), 1e-15);
  EXPECT_EQ(c.n_lower, 2);
  EXPECT_EQ(c.worst, 2.0);
  EXPECT_EQ(c.worst_matrix, 1u);
}

TEST(Compare, equal_scores_have_no_difference_and_no_interval) {
  const std::vector<double> scores = {1, 5, 2}, weights = {10, 20, 30};
  const PairedDifference d = paired_bootstrap(scores, scores, weights);
  EXPECT_EQ(d.mean, 0);
  EXPECT_EQ(d.low, 0);
  EXPECT_EQ(d.high, 0);
}

TEST(Compare, rows_count_by_their_weight) {
  const std::vector<double> peer = {30, 10}, ours = {0, 0}, weights = {300, 100};  // 0.1 a position in either row
  const PairedDifference d = paired_bootstrap(peer, ours, weights);
  for (const double value : {d.mean, d.low, d.high}) EXPECT_NEAR(value, 0.1, 1e-15);
}

// 400 rows of standard deviation 1: the interval of the mean is +-1.96 / 20, known to a few percent from 10,000
// resamples and 400 rows.
TEST(Compare, interval_is_as_wide_as_the_normal_one) {
  const CounterRng rng(5, "rows");
  const size_t n = 400;
  std::vector<double> peer(n), ours(n), weights(n, 1.0);
  double mean = 0, variance = 0;
  for (size_t i = 0; i < n; ++i) {
    const double common = 10 * rng.uniform(3 * i);  // both sides share it: pairing removes it
    const double noise =
        std::sqrt(-2 * std::log(1 - rng.uniform(3 * i + 1))) * std::cos(6.283185307179586 * rng.uniform(3 * i + 2));
    peer[i] = common + 0.3 + noise;
    ours[i] = common;
    mean += (0.3 + noise) / static_cast<double>(n);
  }
  for (size_t i = 0; i < n; ++i) variance += std::pow(peer[i] - ours[i] - mean, 2) / static_cast<double>(n);
  const double half = 1.959964 * std::sqrt(variance / static_cast<double>(n));
  const PairedDifference d = paired_bootstrap(peer, ours, weights);
  EXPECT_NEAR(d.mean, mean, 1e-12);
  // A percentile of 10,000 draws has a standard error of 2.7 % of sigma at 2.5 %: four of them, over 1.96 sigma.
  EXPECT_NEAR(d.low, mean - half, 0.055 * half);
  EXPECT_NEAR(d.high, mean + half, 0.055 * half);
}

}  // namespace
}  // namespace espalier::peer
