#include "stages/swap_sides.h"

namespace espalier {

std::vector<SwapSide> swap_sides(const SwapSensitivityOptions& options) {
  std::vector<SwapSide> out;
  for (size_t p = 0; p < options.packs.size(); ++p) {
    if (options.method != SensitivityMethod::kNoise) {
      out.push_back({p, 1, options.packs[p]});
      continue;
    }
    for (const double amplitude : {1.0, 0.5}) out.push_back({p, amplitude, options.packs[p] + (amplitude == 1 ? " x 1" : " x 0.5")});
  }
  return out;
}

std::vector<Swap> swaps_of_layers(const std::vector<SwapSide>& sides, const SwapSensitivityOptions& options, int n_layers) {
  std::vector<Swap> out;
  for (const SwapSide& side : sides) {
    std::vector<std::optional<WeightNoise>> noises = {std::nullopt};
    if (options.method == SensitivityMethod::kNoise) {
      noises.clear();
      for (int draw = 1; draw <= options.draws; ++draw) {
        for (const int d : {draw, -draw}) noises.push_back(WeightNoise{options.noise, side.amplitude, d, options.seed});
      }
    }
    const bool is_around = options.method == SensitivityMethod::kAround;
    for (const auto& noise : noises) {
      for (int l = 0; l < n_layers; ++l) out.push_back({static_cast<int>(side.pack), l, -1, is_around, noise});
      out.push_back({static_cast<int>(side.pack), -1, -1, false, noise});
    }
  }
  return out;
}

void merge_sides(SwapMeasurement* m, size_t n_sides, size_t n_layers, const SwapSensitivityOptions& options) {
  const size_t n_rows = m->row_domain.size(), side = (n_layers + 1) * n_rows;
  if (options.method == SensitivityMethod::kNoise) {
    const size_t n_draws = 2 * static_cast<size_t>(options.draws);
    std::vector<double> mean(n_sides * side, 0);
    for (size_t s = 0; s < n_sides; ++s) {
      for (size_t draw = 0; draw < n_draws; ++draw) {
        for (size_t i = 0; i < side; ++i) mean[s * side + i] += m->kl[(s * n_draws + draw) * side + i] / static_cast<double>(n_draws);
      }
    }
    m->kl = std::move(mean);
  }
  if (options.method == SensitivityMethod::kAround) {
    for (size_t i = 0; i < n_layers * n_rows; ++i) m->kl[i] = m->kl[n_layers * n_rows + i % n_rows] - m->kl[i];
  }
}

}  // namespace espalier
