#include "ops/select.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/simd_tier.h"

namespace espalier::ops {

void select_top_k(const float* scores, int64_t n, int64_t k, const uint8_t* allowed, int64_t block_size,
                  std::vector<int32_t>& out) {
  if (active_simd_tier() == SimdTier::kReference) return reference::select_top_k(scores, n, k, allowed, block_size, out);
  const size_t first = out.size();
  for (int64_t j = 0; j < n; ++j) {
    if (allowed == nullptr || allowed[j / block_size] != 0) out.push_back(static_cast<int32_t>(j));
  }
  if (static_cast<int64_t>(out.size() - first) <= k) return;
  const auto key = [&](int32_t j) {
    return std::isnan(scores[j]) ? -std::numeric_limits<float>::infinity() : scores[j];
  };
  const auto begin = out.begin() + static_cast<std::ptrdiff_t>(first);
  std::nth_element(begin, begin + k, out.end(), [&](int32_t a, int32_t b) {
    const float sa = key(a);
    const float sb = key(b);
    return sa != sb ? sa > sb : a < b;
  });
  out.resize(first + static_cast<size_t>(k));
  std::sort(out.begin() + static_cast<std::ptrdiff_t>(first), out.end());
}

void select_blocks(const float* scores, int64_t n, int64_t k, int64_t block_size, uint8_t* mask, int64_t n_blocks) {
  if (active_simd_tier() == SimdTier::kReference) return reference::select_blocks(scores, n, k, block_size, mask, n_blocks);
  std::fill_n(mask, n_blocks, uint8_t{0});
  const int64_t used = (n + block_size - 1) / block_size;
  if (used == 0) return;
  std::vector<float> best(static_cast<size_t>(used), -std::numeric_limits<float>::infinity());
  for (int64_t j = 0; j < n; ++j) {
    float& b = best[static_cast<size_t>(j / block_size)];
    b = scores[j] > b ? scores[j] : b;
  }
  best.back() = std::numeric_limits<float>::infinity();
  std::vector<int32_t> chosen;
  select_top_k(best.data(), used, k, nullptr, 1, chosen);
  for (int32_t b : chosen) mask[b] = best[static_cast<size_t>(b)] > -std::numeric_limits<float>::infinity() ? 1 : 0;
}

}  // namespace espalier::ops
