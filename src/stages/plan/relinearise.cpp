#include "stages/plan/relinearise.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "stages/plan/expert_errors.h"

namespace espalier {

Result<Sensitivity> relinearise(const PlanInputs& inputs, const Sensitivity& around, const PackPlan& plan,
                                std::string_view plan_sha256) {
  const auto refuse = [](const std::string& what) { return failed_precondition("re-linearisation: " + what); };
  if (!around.base) return refuse("the second table was not measured around a plan ('base' is missing)");
  if (around.base->plan_sha256 != plan_sha256) {
    return refuse("the second table was measured around the plan " + around.base->plan_sha256 + ", found " +
                  std::string(plan_sha256));
  }
  const Sensitivity& native = inputs.table;
  if (native.base) return refuse("the first table must be measured around the native model, found one around a plan");
  const size_t n_domains = native.domains.size();
  if (around.domains.size() != n_domains) {
    return refuse("expected " + std::to_string(n_domains) + " domains in both tables, found " +
                  std::to_string(around.domains.size()));
  }
  for (size_t d = 0; d < n_domains; ++d) {
    if (around.domains[d].name != native.domains[d].name) {
      return refuse("expected domain '" + native.domains[d].name + "' in both tables, found '" +
                    around.domains[d].name + "'");
    }
  }
  Sensitivity out = native;
  out.method = native.method + "+around";
  out.base = around.base;
  for (size_t l = 0; l < out.layers.size(); ++l) {
    LayerSensitivity& layer = out.layers[l];
    for (size_t d = 0; d < n_domains; ++d) {
      layer.slope[d] = (layer.slope[d] + around.layers[l].slope[d]) / 2;
      layer.slope_se[d] = std::hypot(layer.slope_se[d], around.layers[l].slope_se[d]) / 2;
    }
  }
  // With additivity 1 and no floor, the plan's KL is the bare sum over layers.
  PlanInputs bare = inputs;
  bare.table = out;
  for (SensitivityDomain& d : bare.table.domains) {
    d.floor = 0;
    d.additivity = 1;
  }
  ASSIGN_OR_RETURN(const ExpertErrors errors, ExpertErrors::make(bare, PlanRequest()));
  ASSIGN_OR_RETURN(const AllocationUse use, errors.use_of(plan));
  for (size_t d = 0; d < n_domains; ++d) {
    SensitivityDomain& domain = out.domains[d];
    if (!(use.kl[d] > 0)) return refuse("the tables predict no error at all in domain '" + domain.name + "'");
    domain.additivity = std::max(0.0, around.base->kl[d] - domain.floor) / use.kl[d];
  }
  return out;
}

std::vector<std::string> additivity_notes(const Sensitivity& table) {
  std::vector<std::string> out;
  for (const SensitivityDomain& d : table.domains) {
    if (d.additivity >= 0.7 && d.additivity <= 1.4) continue;
    char text[64];
    std::snprintf(text, sizeof text, "additivity %.3f is outside [0.7, 1.4]", d.additivity);
    out.push_back("domain '" + d.name + "': " + text + "; measure again around the plan (--around)");
  }
  return out;
}

}  // namespace espalier
