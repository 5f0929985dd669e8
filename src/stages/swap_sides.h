// What a sensitivity measurement exchanges layers for, as a list of exchanges, and how their KL becomes one value per side, layer
// and row again. Part of swap_sensitivity.h.
#pragma once

#include <string>
#include <vector>

#include "stages/swap_sensitivity.h"

namespace espalier {

// What a layer is exchanged for: a pack, or noise as strong as `amplitude` times its errors.
struct SwapSide {
  size_t pack = 0;
  double amplitude = 1;
  std::string name;
};

std::vector<SwapSide> swap_sides(const SwapSensitivityOptions& options);

// The exchanges of all sides: every layer and then all of them; with noise, the same for one draw after the other.
std::vector<Swap> swaps_of_layers(const std::vector<SwapSide>& sides, const SwapSensitivityOptions& options, int n_layers);

// m->kl := [n_sides, n_layers + 1, n_rows] (and exchanges beyond, for kSwap): draws become their mean, and a restored layer becomes
// what restoring it saves.
void merge_sides(SwapMeasurement* m, size_t n_sides, size_t n_layers, const SwapSensitivityOptions& options);

}  // namespace espalier
