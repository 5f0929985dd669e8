// The allocation problem of a model's routed experts: one item per expert, whose options are the widths that the pins
// leave.
//
// With one width per matrix an expert's options are the merged steps of its matrices' hulls, in order of error saved
// per bit: every combination that a Lagrangian can choose. A native expert (all three matrices, or none) is one more
// option. Source: quality.md 3.1, 3.2 and 3.5.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "stages/plan/allocation.h"
#include "stages/plan/expert_errors.h"
#include "stages/plan/plan_inputs.h"

namespace espalier {

struct ExpertProblem {
  AllocationProblem allocation;                   // items layer by layer, expert by expert
  std::vector<std::vector<ExpertWidths>> widths;  // [item][option label]
  std::vector<WidthPin> pins;                     // those asked for, then one per super expert
  int64_t fixed_half_bits = 0;                    // of what the budget counts besides the routed experts
  ReadBits reads = 0;                             // sum of reads times weights

  PackPlan plan(const std::vector<int>& choice, const Config& config) const;
};

// Limits in half bits: of the routed experts, and of all that the budget's definition counts.
// Errors: invalid_argument for a budget or cap out of range, a width set without a width, a card budget without
// dense_k2; failed_precondition, naming the pins and how much they are over, when they contradict each other or alone
// pass a limit.
Result<ExpertProblem> make_expert_problem(const PlanInputs& inputs, const PlanRequest& request,
                                          const ExpertErrors& errors);

// Weights that the card definition counts besides the routed experts.
int64_t card_dense_weights(const Config& config);

}  // namespace espalier
