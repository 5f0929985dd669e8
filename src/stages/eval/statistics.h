// Per-position comparison of two models' logits, and the summaries that a result reports.
//
// KL_t = sum_v p_t(v) (log p_t(v) - log q_t(v)), p = reference, q = candidate, natural log, temperature 1. All sums in
// fp64 in index order, so equal logits give exactly 0. Source: quality specification 4.1, 4.2. Threads: pure.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace espalier {

// What one position of a panel contributes.
struct PositionScore {
  double kl = 0;             // nats
  double nll_reference = 0;  // -log p(label)
  double nll_candidate = 0;  // -log q(label)
  double confidence = 0;     // max_v p(v)
  bool same_top1 = false;    // argmax equal; ties go to the lower id on both sides
};

// reference, candidate: [vocab] logits, finite. label: the actual next token, < vocab.
PositionScore score_position(std::span<const float> reference, std::span<const float> candidate, int32_t label);

// -log softmax(logits)[label].
double negative_log_likelihood(std::span<const float> logits, int32_t label);

// log sum_v exp(logits[v]), max-subtracted.
double log_sum_exp(std::span<const float> logits);

// Index of the largest value, the lowest on ties.
int32_t argmax(std::span<const float> logits);

// Coarse-grained KL over the ids in `kept` plus one bucket for the rest: a lower bound of the full KL.
// kept: distinct ids < vocab. The rest probabilities are clamped at 1e-12.
double top_k_kl(std::span<const float> reference, std::span<const float> candidate, std::span<const int32_t> kept);

// Linear interpolation at fraction * (n - 1) of the sorted values; fraction in [0, 1]; sorted must be ascending, not
// empty.
double percentile(std::span<const double> sorted, double fraction);

// Sums over positions; add in a fixed order.
struct ScoreSums {
  int64_t positions = 0;
  int64_t same_top1 = 0;
  double kl = 0;
  double nll_reference = 0;
  double nll_candidate = 0;

  void add(const PositionScore& score);
  void add(const ScoreSums& other);
  double kl_mean() const { return kl / static_cast<double>(positions); }
  double top1() const { return static_cast<double>(same_top1) / static_cast<double>(positions); }
  double ppl_reference() const;
  double ppl_candidate() const;
};

// Positions grouped by the reference's confidence: [0,.25) [.25,.5) [.5,.75) [.75,.95) [.95,1].
inline constexpr double kConfidenceEdges[] = {0.25, 0.5, 0.75, 0.95};
int confidence_bucket(double confidence);

}  // namespace espalier
