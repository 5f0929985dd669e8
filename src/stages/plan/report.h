// What a plan is, for people: widths by layer, who got what and why, predicted KL, sizes and speed ceilings, as text,
// as a table, as a page and as figures (SVG that follows the reader's light or dark setting).
#pragma once

#include <string>
#include <vector>

#include "stages/plan/plan.h"

namespace espalier {

std::string plan_report_text(const PlanInputs& inputs, const PlanRequest& request, const PlanOutcome& outcome);

// One line per expert (CSV with a header): widths, importance (nats per unit of error), reads per token, what the last
// step saved and the next would save per bit, the price of a bit, and what decided ("price", "pin", "widest", or the
// rule's name).
std::string plan_experts_csv(const PlanInputs& inputs, const PlanRequest& request, const PlanOutcome& outcome);

// Share of each width in every layer, with the layer's mean.
std::string widths_by_layer_svg(const PackPlan& plan, int n_layers);
// Matrices of each width.
std::string widths_svg(const PackPlan& plan, int n_layers);
// Predicted KL against the budget for the best plan and the uniform mix; `chosen` is marked.
std::string budget_curve_svg(const std::vector<BudgetPoint>& curve, const BudgetPoint& chosen);


// All of it as one self-contained page (HTML); `curve` and `chosen` as for budget_curve_svg.
std::string plan_report_html(const PlanInputs& inputs, const PlanRequest& request, const PlanOutcome& outcome,
                             const std::vector<BudgetPoint>& curve, const BudgetPoint& chosen);

}  // namespace espalier
