// Choosing entries by score: the k best, ties to the lower index, result ascending; and the best blocks of entries
// (candidate blocks). Pure comparisons: every implementation gives the same answer. Source: model.md 5.4, 5.5.
#pragma once

#include <cstdint>
#include <vector>

namespace espalier::ops {

// Indices of the k best of scores[0..n), ascending, appended to `out`. `allowed` (may be null) masks entries out: block
// j / block_size must be set. Fewer than k are returned when fewer are allowed. NaN scores count as -infinity.
void select_top_k(const float* scores, int64_t n, int64_t k, const uint8_t* allowed, int64_t block_size,
                  std::vector<int32_t>& out);

// mask[b] = 1 for the best `k` blocks of block_size entries among scores[0..n) (a block's score is its best entry; the
// last block is always kept), else 0. mask has n_blocks >= ceil(n / block_size) elements; the rest is 0.
void select_blocks(const float* scores, int64_t n, int64_t k, int64_t block_size, uint8_t* mask, int64_t n_blocks);

namespace reference {
void select_top_k(const float* scores, int64_t n, int64_t k, const uint8_t* allowed, int64_t block_size,
                  std::vector<int32_t>& out);
void select_blocks(const float* scores, int64_t n, int64_t k, int64_t block_size, uint8_t* mask, int64_t n_blocks);
}  // namespace reference

}  // namespace espalier::ops
