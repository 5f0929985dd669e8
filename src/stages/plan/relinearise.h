// One round of re-linearisation: slopes measured around a present plan (all layers quantized, one restored to native)
// averaged with those measured around the native model, and additivity set so that the present plan's own KL is what
// the table predicts.
//
// A table around the native model overstates or understates what a layer costs once all others are quantized; the mean
// of both slopes is the trapezoid rule between the two points. Source: quality.md 2.4.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "stages/plan/plan_inputs.h"

namespace espalier {

// inputs.table: measured around the native model. around: has a `base`, whose plan_sha256 must be that of `plan`'s
// file. Errors: failed_precondition naming the field for tables that do not belong together.
Result<Sensitivity> relinearise(const PlanInputs& inputs, const Sensitivity& around, const PackPlan& plan,
                                std::string_view plan_sha256);

// Domains whose additivity is outside [0.7, 1.4]: there the table should be measured again around the plan. One line
// each.
std::vector<std::string> additivity_notes(const Sensitivity& table);

}  // namespace espalier
