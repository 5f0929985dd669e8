#include "codec/spread_search.h"

#include <algorithm>

namespace espalier::codec {

double best_spread_factor(const std::vector<double>& weight, int64_t k, int64_t n, int n_tiles,
                          const SearchOptions& search, ThreadPool& pool) {
  constexpr double kStep = 0.06;
  constexpr double kFeedback = 1.02;  // by how much error feedback widens the targets
  std::vector<double> errors(static_cast<size_t>(3) * static_cast<size_t>(n_tiles));
  pool.parallel_for(int64_t{3} * n_tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      const int64_t tile = at / 3;
      const int64_t b = tile * (k / kTile) / n_tiles;  // spread over the rows, walking along the columns
      const int64_t s = 5 * tile % (n / kTile);
      const double factor = kFeedback * (1 + kStep * static_cast<double>(at % 3 - 1));
      float target[kTileSize];
      uint16_t states[kTileSize];
      for (int p = 0; p < kTileSize; ++p) {
        const int e = ring_to_row_major()[p];
        target[p] = static_cast<float>(std::clamp(
            factor * weight[static_cast<size_t>((b * kTile + e / kTile) * n + s * kTile + e % kTile)], -1e6, 1e6));
      }
      search_tile(target, search, states);
      errors[static_cast<size_t>(at)] = tile_error(target, states, search.codebook) / (factor * factor);
    }
  });
  double sum[3] = {};
  for (size_t at = 0; at < errors.size(); ++at) sum[at % 3] += errors[at];
  const double curvature = sum[0] - 2 * sum[1] + sum[2];
  const double offset = curvature > 0 ? 0.5 * (sum[0] - sum[2]) / curvature : sum[0] < sum[2] ? -1.0 : 1.0;
  return 1 + kStep * std::clamp(offset, -1.0, 1.0);
}

}  // namespace espalier::codec
