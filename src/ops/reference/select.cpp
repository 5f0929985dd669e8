#include "ops/select.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace espalier::ops::reference {

// k rounds of "the best one not taken yet".
void select_top_k(const float* scores, int64_t n, int64_t k, const uint8_t* allowed, int64_t block_size,
                  std::vector<int32_t>& out) {
  std::vector<uint8_t> taken(static_cast<size_t>(n), 0);
  for (int64_t round = 0; round < k; ++round) {
    int64_t best = -1;
    float best_score = 0;
    for (int64_t j = 0; j < n; ++j) {
      if (taken[static_cast<size_t>(j)] != 0 || (allowed != nullptr && allowed[j / block_size] == 0)) continue;
      const float s = std::isnan(scores[j]) ? -std::numeric_limits<float>::infinity() : scores[j];
      if (best < 0 || s > best_score) {
        best = j;
        best_score = s;
      }
    }
    if (best < 0) break;
    taken[static_cast<size_t>(best)] = 1;
  }
  for (int64_t j = 0; j < n; ++j) {
    if (taken[static_cast<size_t>(j)] != 0) out.push_back(static_cast<int32_t>(j));
  }
}

void select_blocks(const float* scores, int64_t n, int64_t k, int64_t block_size, uint8_t* mask, int64_t n_blocks) {
  const float low = -std::numeric_limits<float>::infinity();
  std::vector<float> best(static_cast<size_t>(n_blocks), low);
  for (int64_t j = 0; j < n; ++j)
    best[static_cast<size_t>(j / block_size)] = std::max(best[static_cast<size_t>(j / block_size)], scores[j]);
  if (n > 0) best[static_cast<size_t>((n - 1) / block_size)] = std::numeric_limits<float>::infinity();
  std::fill_n(mask, n_blocks, uint8_t{0});
  std::vector<int32_t> chosen;
  select_top_k(best.data(), n_blocks, k, nullptr, 1, chosen);
  for (int32_t b : chosen) mask[b] = best[static_cast<size_t>(b)] > low ? 1 : 0;
}

}  // namespace espalier::ops::reference
