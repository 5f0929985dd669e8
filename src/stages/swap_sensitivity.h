// From measured exchanges to a sensitivity table: slope and floor of every layer, how layers add up, and their errors.
//
//     K_{l,d}(pack) = floor_{l,d} + slope_{l,d} * D_{l,d}(pack),   D = sum_e share_{l,e,d} * error_e(widths of the pack)
//     K_d(all)      = floor_d + additivity_d * sum_l slope_{l,d} D_{l,d}(all)
//
// One pack: floors are 0. Two packs of different widths (one of them wide, or the layer's own weights at 8 bits): both are
// determined; slopes and floors are kept at or above 0. Noise: one pack's errors at full and half amplitude stand for two packs
// (D as the square), means over pairs of opposite draws. Around a plan: the pack's KL less its KL with the layer restored. Errors of the slopes come from resampling rows within their domain. Source:
// quality.md 2.3, 2.4, 2.7; docs/formats/sensitivity.md.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/progress.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "model/block_slopes.h"
#include "model/pack_plan.h"
#include "model/routing_statistics.h"
#include "model/sensitivity.h"
#include "stages/swap_sweep.h"

namespace espalier {

enum class SensitivityMethod { kSwap, kNoise, kAround };

struct SwapSensitivityOptions {
  SensitivityMethod method = SensitivityMethod::kSwap;
  NoiseShape noise = NoiseShape::kShaped;
  int draws = 2;  // pairs of opposite draws
  std::vector<std::string> packs;  // names for the table; one or two with kSwap, else one
  bool by_expert = false;          // exchange every expert by itself too, and measure the shares by that
  int resamples = 200;
  uint64_t seed = 0;
  SwapSweepOptions sweep;
};

struct SwapSensitivity {
  Sensitivity table;           // hashes are the caller's; kAround: also base.plan_sha256
  BlockSlopes blocks;          // slopes of single rows
  RoutingStatistics routing;   // as given; by expert: with the shares that the exchanges say
};

// Widths of every routed expert of a pack, native where it has none. [n_layers * n_experts]
Result<std::vector<ExpertWidths>> expert_widths(const WeightLoader& pack);

// packs: as options.packs, from a checkpoint of native's shape; routing: of the domains of the data; errors: measured errors of the
// matrices, absent: the amplitude law. Errors: those of measure_swaps; failed_precondition when two packs have the same widths in
// some layer, or a domain is missing in the routing statistics.
Result<SwapSensitivity> swap_sensitivity(const WeightLoader& native, const std::vector<const WeightLoader*>& packs,
                                         const RoutingStatistics& routing, const std::optional<MatrixErrors>& errors,
                                         const Dataset& data, const SwapSensitivityOptions& options, Progress& progress,
                                         ThreadPool& pool);

}  // namespace espalier
