// KL of a network in which some routed experts are a pack's and everything else is native, for many such exchanges in one sweep.
//
// The rows run through the layers once: at layer l every exchange that begins there splits off with a copy of the clean state, and all
// that are under way go on through the native layers behind it, so a layer costs one pass per exchange that is open. Rows are taken in
// batches that bound the memory. KL is paired by position: both sides see the same ids and the same state up to l. Source: quality.md
// 2.4, 2.8.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/progress.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "model/dataset.h"
#include "model/numerics.h"
#include "model/weights.h"
#include "stages/weight_noise.h"

namespace espalier {

// One exchange: experts of pack `pack` in layer `layer` (-1: all layers), expert `expert` (-1: all of the layer). restores: the
// other way round, all layers are the pack's but `layer` (list the exchange of all layers too, from which it splits off). noise:
// noise made from the pack's errors in place of the pack's weights.
struct Swap {
  int pack = 0;
  int layer = -1;
  int expert = -1;
  bool restores = false;
  std::optional<WeightNoise> noise = std::nullopt;
};

struct SwapSweepOptions {
  Numerics numerics = Numerics::kKvq;
  uint64_t memory_bytes = uint64_t{4} << 30;  // for states in flight; one row at a time is the least
};

// Sums over the scored positions of single rows.
struct SwapMeasurement {
  std::vector<int32_t> row_domain;    // [n_rows] index into domains
  std::vector<int64_t> row_positions; // [n_rows] scored positions
  std::vector<std::string> domains;   // order of first appearance
  std::vector<double> kl;             // [n_swaps, n_rows] sum over the row's scored positions, nats

  // Mean over the positions of a domain.
  double mean(size_t swap, size_t domain) const;
};

// native: the checkpoint; packs: made from it, with the same config. Exchanges of a layer or expert that a pack keeps native give 0
// exactly. Bytes depend on neither threads nor memory. Errors: invalid_argument for a restored layer without the exchange of all
// layers; failed_precondition naming a pack of another shape; those of loading; data_loss for logits that are not finite; cancelled.
Result<SwapMeasurement> measure_swaps(const WeightLoader& native, const std::vector<const WeightLoader*>& packs,
                                      const std::vector<Swap>& swaps, const Dataset& data, const SwapSweepOptions& options,
                                      Progress& progress, ThreadPool& pool);

}  // namespace espalier
