// Two encoders on the same data: ratios of errors per matrix, and the difference of a per-row score with a bootstrap
// interval. Source: docs/decisions/exl3-primary-comparison.md. Threads: pure.
#pragma once

#include <cstdint>
#include <span>

namespace espalier::peer {

// ours / peer over the matrices; errors positive, at least one.
struct ErrorComparison {
  double ratio = 0;     // geometric mean
  int64_t n_lower = 0;  // matrices where ours is lower
  double worst = 0;     // largest ratio
  size_t worst_matrix = 0;
};
ErrorComparison compare_errors(std::span<const double> peer, std::span<const double> ours);

double geometric_mean(std::span<const double> values);

// (sum of peer - ours) / (sum of weights) over rows, and the 2.5 and 97.5 percentiles of the same ratio over kResamples
// resamples: as many rows as there are, drawn with replacement by CounterRng(1, "bootstrap"), the same rows for every
// pair of equally many rows.
inline constexpr int kResamples = 10000;
struct PairedDifference {
  double mean = 0, low = 0, high = 0;
};
PairedDifference paired_bootstrap(std::span<const double> peer, std::span<const double> ours,
                                  std::span<const double> weights);

}  // namespace espalier::peer
