// The simple rules that a measured plan is compared with, at the same storage and in the same form: one width per
// expert.
//
// uniform: the widths below and above the budget, mixed at random (seeded) so that the mean is met. ends-first:
// everything at the width below, then promoted from both ends of the stack inwards while it fits. frequency: the
// allocator with how often an expert is read in place of what was measured. layer: the allocator with one sensitivity
// per layer. None knows pins, guards or a read cap. Source: quality.md 3.3, 3.4 and 9.4.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "stages/plan/expert_errors.h"
#include "stages/plan/plan_inputs.h"

namespace espalier {

// storage_limit: half bits of all routed experts. Widths: the request's, native left out. Errors: failed_precondition
// when the narrowest width passes the limit.
Result<PackPlan> plan_by_rule(PlanRule rule, const PlanInputs& inputs, const PlanRequest& request,
                              const ExpertErrors& errors, int64_t storage_limit);

}  // namespace espalier
