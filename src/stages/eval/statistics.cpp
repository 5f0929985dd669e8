#include "stages/eval/statistics.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace espalier {

double log_sum_exp(std::span<const float> logits) {
  CHECK(!logits.empty()) << "no logits";
  const double top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (float x : logits) sum += std::exp(static_cast<double>(x) - top);
  return top + std::log(sum);
}

int32_t argmax(std::span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

double negative_log_likelihood(std::span<const float> logits, int32_t label) {
  CHECK(label >= 0 && static_cast<size_t>(label) < logits.size()) << "label outside the vocabulary";
  return log_sum_exp(logits) - static_cast<double>(logits[static_cast<size_t>(label)]);
}

PositionScore score_position(std::span<const float> reference, std::span<const float> candidate, int32_t label) {
  CHECK(reference.size() == candidate.size()) << "logits of different vocabularies";
  CHECK(label >= 0 && static_cast<size_t>(label) < reference.size()) << "label outside the vocabulary";
  const double norm_p = log_sum_exp(reference);
  const double norm_q = log_sum_exp(candidate);
  PositionScore score;
  for (size_t v = 0; v < reference.size(); ++v) {
    const double log_p = static_cast<double>(reference[v]) - norm_p;
    const double log_q = static_cast<double>(candidate[v]) - norm_q;
    score.kl += std::exp(log_p) * (log_p - log_q);
  }
  const auto at = static_cast<size_t>(label);
  score.nll_reference = norm_p - static_cast<double>(reference[at]);
  score.nll_candidate = norm_q - static_cast<double>(candidate[at]);
  const int32_t best = argmax(reference);
  score.confidence = std::exp(static_cast<double>(reference[static_cast<size_t>(best)]) - norm_p);
  score.same_top1 = best == argmax(candidate);
  return score;
}

double top_k_kl(std::span<const float> reference, std::span<const float> candidate, std::span<const int32_t> kept) {
  const double norm_p = log_sum_exp(reference);
  const double norm_q = log_sum_exp(candidate);
  double kl = 0;
  double rest_p = 1;
  double rest_q = 1;
  for (int32_t id : kept) {
    const double log_p = static_cast<double>(reference[static_cast<size_t>(id)]) - norm_p;
    const double log_q = static_cast<double>(candidate[static_cast<size_t>(id)]) - norm_q;
    kl += std::exp(log_p) * (log_p - log_q);
    rest_p -= std::exp(log_p);
    rest_q -= std::exp(log_q);
  }
  rest_p = std::max(rest_p, 1e-12);
  rest_q = std::max(rest_q, 1e-12);
  return kl + rest_p * std::log(rest_p / rest_q);
}

double percentile(std::span<const double> sorted, double fraction) {
  CHECK(!sorted.empty()) << "percentile of nothing";
  const double place = fraction * static_cast<double>(sorted.size() - 1);
  const auto low = static_cast<size_t>(std::floor(place));
  const size_t high = std::min(low + 1, sorted.size() - 1);
  return sorted[low] + (place - static_cast<double>(low)) * (sorted[high] - sorted[low]);
}

void ScoreSums::add(const PositionScore& score) {
  ++positions;
  same_top1 += score.same_top1 ? 1 : 0;
  kl += score.kl;
  nll_reference += score.nll_reference;
  nll_candidate += score.nll_candidate;
}

void ScoreSums::add(const ScoreSums& other) {
  positions += other.positions;
  same_top1 += other.same_top1;
  kl += other.kl;
  nll_reference += other.nll_reference;
  nll_candidate += other.nll_candidate;
}

double ScoreSums::ppl_reference() const {
  return std::exp(nll_reference / static_cast<double>(positions));
}
double ScoreSums::ppl_candidate() const {
  return std::exp(nll_candidate / static_cast<double>(positions));
}

int confidence_bucket(double confidence) {
  int bucket = 0;
  for (double edge : kConfidenceEdges) bucket += confidence >= edge ? 1 : 0;
  return bucket;
}

}  // namespace espalier
