#include "bench/peer/compare.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/check.h"
#include "base/rng.h"

namespace espalier::peer {
namespace {

// Linear interpolation at fraction * (n - 1).
double percentile(const std::vector<double>& sorted, double fraction) {
  const double place = fraction * static_cast<double>(sorted.size() - 1);
  const auto low = static_cast<size_t>(place);
  const size_t high = std::min(low + 1, sorted.size() - 1);
  return sorted[low] + (place - static_cast<double>(low)) * (sorted[high] - sorted[low]);
}

}  // namespace

double geometric_mean(std::span<const double> values) {
  double sum = 0;
  for (double x : values) sum += std::log(x);
  return std::exp(sum / static_cast<double>(values.size()));
}

ErrorComparison compare_errors(std::span<const double> peer, std::span<const double> ours) {
  CHECK(peer.size() == ours.size() && !ours.empty()) << "errors of different matrices";
  ErrorComparison out;
  std::vector<double> ratios;
  for (size_t i = 0; i < ours.size(); ++i) {
    ratios.push_back(ours[i] / peer[i]);
    out.n_lower += ratios.back() < 1 ? 1 : 0;
    if (ratios.back() > out.worst) {
      out.worst = ratios.back();
      out.worst_matrix = i;
    }
  }
  out.ratio = geometric_mean(ratios);
  return out;
}

PairedDifference paired_bootstrap(std::span<const double> peer, std::span<const double> ours,
                                  std::span<const double> weights) {
  CHECK(peer.size() == ours.size() && weights.size() == ours.size() && !ours.empty()) << "scores of different rows";
  const size_t n = ours.size();
  const auto ratio = [&](auto&& row_of) {
    double difference = 0, weight = 0;
    for (size_t i = 0; i < n; ++i) {
      const size_t r = row_of(i);
      difference += peer[r] - ours[r];
      weight += weights[r];
    }
    return difference / weight;
  };
  const CounterRng rng(1, "bootstrap");
  std::vector<double> ratios;
  for (size_t resample = 0; resample < kResamples; ++resample) {
    ratios.push_back(ratio([&](size_t i) {
      return std::min(n - 1, static_cast<size_t>(rng.uniform(resample * n + i) * static_cast<double>(n)));
    }));
  }
  std::sort(ratios.begin(), ratios.end());
  return {ratio([](size_t i) { return i; }), percentile(ratios, 0.025), percentile(ratios, 0.975)};
}

}  // namespace espalier::peer
