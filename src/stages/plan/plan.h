// `espalier plan`: from the measured tables and a request to the widths of every routed expert, with what they predict
// and cost.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "stages/plan/expert_errors.h"
#include "stages/plan/expert_problem.h"
#include "stages/plan/plan_inputs.h"

namespace espalier {

// What reading weights alone allows at batch one, in tokens per second.
struct SpeedCeiling {
  std::string machine;
  int ranks = 1;
  double bytes_per_token = 0;  // on the first rank
  double tokens_per_second = 0;
};

struct PlanFigures {
  double predicted_kl = 0;  // mean over domains by weight
  std::vector<double> kl;   // [n_domains]
  double bound = 0, gap = 0;
  double bpw_routed = 0, bpw_read = 0;
  std::optional<double> bpw_card;  // when the plan says the dense widths
  int64_t half_bits = 0;           // of the routed experts
  // Bytes, weights and scale vectors: routed experts, and the backbone's other quantized matrices and head when their
  // widths are said.
  double routed_bytes = 0;
  std::optional<double> dense_bytes;
  std::map<int, double> rank_bytes;  // ranks -> bytes of the first rank, of what is counted above
  std::vector<SpeedCeiling> ceilings;
};

struct PlanOutcome {
  PackPlan plan;
  PlanFigures figures;
  Allocation allocation;  // of the measured problem; for a simple rule only its bound is used
  ExpertProblem problem;
  std::map<PlanRule, PlanFigures> rules;  // the simple rules at the same storage
};

// Errors: those of ExpertErrors::make, make_expert_problem and allocate.
Result<PlanOutcome> make_plan(const PlanInputs& inputs, const PlanRequest& request);

// What any plan of this model's experts predicts and costs; `bound` and `gap` are 0. Errors: those of
// ExpertErrors::use_of.
Result<PlanFigures> plan_figures(const PlanInputs& inputs, const PlanRequest& request, const ExpertErrors& errors,
                                 const PackPlan& plan);

// Predicted KL of the best plan at each budget, under the request's read cap and pins and without its guards. Budgets
// that cannot be met are left out.
struct BudgetPoint {
  double bpw = 0, kl = 0, uniform_kl = 0;
};
Result<std::vector<BudgetPoint>> budget_curve(const PlanInputs& inputs, const PlanRequest& request,
                                              const std::vector<double>& budgets);

}  // namespace espalier
