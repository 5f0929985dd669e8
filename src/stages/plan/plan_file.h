// The plan as a file: pack_plan.h's widths, with budget, prediction, inputs and pins beside them, so that a reader of
// the plan alone can see what it was made for and from. Source: quality.md 3.6; docs/formats/plan.md.
#pragma once

#include <map>
#include <string>

#include "stages/plan/plan.h"

namespace espalier {

// inputs: "sensitivity_sha256", "routing_sha256", "errors_sha256", "calibration_sha256", "model_identity", "solver" and
// the like.
std::string plan_file_json(const PlanInputs& tables, const PlanRequest& request, const PlanOutcome& outcome,
                           const std::map<std::string, std::string>& inputs);

}  // namespace espalier
