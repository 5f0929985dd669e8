// Which of a token's routed experts are computed when experts are pruned as served: sorted by routing weight, the
// smallest set whose weights reach a part of their sum, but never fewer than a minimum. Source: packs.md 5 (pruning
// detail), quality.md 4.3.
#pragma once

#include <cstdint>

namespace espalier {

struct ExpertPruning {
  double top_p = 0.85;  // (0, 1]: part of the sum of the weights that the kept ones reach
  int64_t min_experts = 3;
};

// weights [n_active], >= 0 -> kept[i] is 1 for those that stay; equal weights stay in the order given. Returns how many
// stay. Weights whose sum is 0 or no number all stay. Threads: pure.
int64_t keep_experts(const ExpertPruning& pruning, const float* weights, int64_t n_active, uint8_t* kept);

}  // namespace espalier
