// The spread of a rotated weight, searched on sample tiles instead of taken from the table. Internal to the quantizer.
#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.h"
#include "codec/viterbi.h"

namespace espalier::codec {

// By what to multiply the spread of weight [k, n]: the least relative error of `n_tiles` tiles at three factors, by a
// parabola; within 0.94 .. 1.06.
double best_spread_factor(const std::vector<double>& weight, int64_t k, int64_t n, int n_tiles,
                          const SearchOptions& search, ThreadPool& pool);

}  // namespace espalier::codec
