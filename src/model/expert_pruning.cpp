#include "model/expert_pruning.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace espalier {

int64_t keep_experts(const ExpertPruning& pruning, const float* weights, int64_t n_active, uint8_t* kept) {
  double sum = 0;
  for (int64_t i = 0; i < n_active; ++i) sum += static_cast<double>(weights[i]);
  if (!(sum > 0)) {
    std::fill_n(kept, n_active, uint8_t{1});
    return n_active;
  }
  std::vector<int64_t> order(static_cast<size_t>(n_active));
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return weights[a] > weights[b]; });
  std::fill_n(kept, n_active, uint8_t{0});
  double mass = 0;
  int64_t n = 0;
  while (n < n_active && (n < pruning.min_experts || mass < pruning.top_p * sum)) {
    const int64_t i = order[static_cast<size_t>(n++)];
    mass += static_cast<double>(weights[i]);
    kept[i] = 1;
  }
  return n;
}

}  // namespace espalier
