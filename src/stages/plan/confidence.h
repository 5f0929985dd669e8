// How far a plan can be trusted: the allocation solved again under resampled slopes.
//
// Each resample draws every domain's blocks with replacement (or, without per-block slopes, every slope from a normal
// distribution with its standard error, not below 0), recomputes the slopes and solves the same problem. Source:
// quality.md 2.7.
#pragma once

#include <cstdint>
#include <vector>

#include "base/progress.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "model/block_slopes.h"
#include "stages/plan/plan.h"

namespace espalier {

struct PlanConfidence {
  int64_t resamples = 0;
  int64_t infeasible = 0;                     // resamples whose limits could not be met; they count in nothing else
  bool has_blocks = false;                    // drawn from blocks, else from standard errors
  double stable_share = 0;                    // experts that keep the plan's widths in at least 90 % of resamples
  double kl_low = 0, kl_high = 0;             // 2.5 % and 97.5 % quantiles of this plan's predicted KL
  std::vector<double> layer_stable;           // [n_layers] the same share by layer
  std::vector<double> slope_low, slope_high;  // [n_layers, n_domains] quantiles of the slopes
};

// blocks: null for standard errors. Resample r depends on (seed, r) alone. Errors: failed_precondition when the blocks
// lack a domain of the table, or when no resample can be solved; cancelled.
Result<PlanConfidence> plan_confidence(const PlanInputs& inputs, const PlanRequest& request, const PlanOutcome& outcome,
                                       const BlockSlopes* blocks, int64_t resamples, ThreadPool& pool,
                                       Progress& progress);

}  // namespace espalier
