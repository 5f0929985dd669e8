#include "runtime/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "runtime/philox.h"

namespace espalier {
namespace {

struct Candidate {
  int32_t id;
  double weight;  // exp((logit - max) / temperature)
  double scaled;  // logit / temperature
};

// Descending by likelihood, ties by id, as a heap order: the best candidate is the heap's front.
bool is_worse(const Candidate& a, const Candidate& b) {
  if (a.scaled != b.scaled) return a.scaled < b.scaled;
  return a.id > b.id;
}

// Keeps the most likely candidates: at most `top_k` of them (0: all), and of those the smallest prefix whose share of their
// mass reaches top_p. The result is in descending order.
std::vector<Candidate> keep_likely(std::vector<Candidate> all, int64_t top_k, double top_p) {
  const size_t limit = top_k > 0 ? std::min<size_t>(all.size(), static_cast<size_t>(top_k)) : all.size();
  double total = 0;
  if (limit == all.size()) {
    for (const Candidate& c : all) total += c.weight;
  }
  std::make_heap(all.begin(), all.end(), is_worse);
  std::vector<Candidate> kept;
  double mass = 0;
  auto end = all.end();
  while (kept.size() < limit) {
    std::pop_heap(all.begin(), end, is_worse);
    --end;
    kept.push_back(*end);
    mass += end->weight;
    // With top_k off, the total is known and the walk stops early; with top_k it must be complete before shares exist.
    if (limit == all.size() && mass >= top_p * total) return kept;
  }
  double prefix = 0;
  for (size_t i = 0; i < kept.size(); ++i) {
    prefix += kept[i].weight;
    if (prefix >= top_p * mass) {
      kept.resize(i + 1);
      break;
    }
  }
  return kept;
}

double gumbel(uint64_t seed, int64_t position, int32_t id) {
  const auto words = philox4x32({static_cast<uint32_t>(position), static_cast<uint32_t>(id) / 4, 0, 0}, seed);
  const double u = (static_cast<double>(words[static_cast<size_t>(id) % 4]) + 0.5) * 0x1.0p-32;
  return -std::log(-std::log(u));
}

}  // namespace

Result<int32_t> choose_token(std::span<const float> logits, const SamplingParams& params, int64_t position) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i]) || logits[i] == kInfinity) {
      return internal_error("sampler: the logit of token " + std::to_string(i) + " at position " +
                            std::to_string(position) + " is not finite; run 'espalier logits' on the same prompt");
    }
  }
  int64_t best = -1;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] > (best < 0 ? -kInfinity : logits[static_cast<size_t>(best)])) best = static_cast<int64_t>(i);
  }
  if (best < 0) {
    return internal_error("sampler: no token is left to choose from at position " + std::to_string(position));
  }
  if (is_greedy(params)) return static_cast<int32_t>(best);

  const double max_scaled = static_cast<double>(logits[static_cast<size_t>(best)]) / params.temperature;
  std::vector<Candidate> candidates;
  candidates.reserve(logits.size());
  for (size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] == -kInfinity) continue;
    const double scaled = static_cast<double>(logits[i]) / params.temperature;
    candidates.push_back({static_cast<int32_t>(i), std::exp(scaled - max_scaled), scaled});
  }
  if (params.top_k > 0 || params.top_p < 1.0) candidates = keep_likely(std::move(candidates), params.top_k, params.top_p);

  int32_t choice = static_cast<int32_t>(best);
  double best_score = -std::numeric_limits<double>::infinity();
  for (const Candidate& c : candidates) {
    if (c.weight < params.min_p) continue;  // the most likely token has weight 1
    const double score = c.scaled + gumbel(params.seed, position, c.id);
    if (score > best_score || (score == best_score && c.id < choice)) {
      best_score = score;
      choice = c.id;
    }
  }
  return choice;
}

}  // namespace espalier
