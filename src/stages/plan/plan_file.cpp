#include "stages/plan/plan_file.h"

#include <nlohmann/json.hpp>

#include "base/check.h"
#include "format/json.h"

namespace espalier {
namespace {

Json width_json(int k2) {
  return k2 % 2 == 0 ? Json(k2 / 2) : Json(k2 / 2.0);
}

void put_range(Json& out, const char* one, const char* many, int first, int last) {
  if (first < 0) return;
  if (first == last) {
    out[one] = first;
  } else {
    out[many] = {first, last};
  }
}

Json pin_json(const WidthPin& pin) {
  constexpr const char* kNames[] = {"w1", "w3", "w2"};
  Json out = Json::object();
  put_range(out, "layer", "layers", pin.first_layer, pin.last_layer);
  put_range(out, "expert", "experts", pin.first_expert, pin.last_expert);
  if (pin.matrix >= 0) out["matrix"] = kNames[pin.matrix];
  if (pin.min_k2 != 0) out["min"] = width_json(pin.min_k2);
  if (pin.max_k2 != 0) out["max"] = width_json(pin.max_k2);
  if (!pin.reason.empty()) out["reason"] = pin.reason;
  return out;
}

}  // namespace

std::string plan_file_json(const PlanInputs& tables, const PlanRequest& request, const PlanOutcome& outcome,
                           const std::map<std::string, std::string>& inputs) {
  const auto base = parse_json(pack_plan_json(outcome.plan, tables.config), "plan");
  CHECK(base.ok()) << base.error().message();  // our own writer's
  Json doc = *base;
  const PlanFigures& f = outcome.figures;
  const bool is_measured = request.rule == PlanRule::kMeasured;
  doc["rule"] = plan_rule_name(request.rule);
  Json& budget = doc["budget"];
  budget["definition"] = request.budget_of == BudgetOf::kCard ? "card" : "routed";
  budget["limit_bpw"] = request.bpw;
  budget["card_bpw"] = f.bpw_card ? Json(*f.bpw_card) : Json(nullptr);
  budget["read_cap"] = request.read_cap ? Json(*request.read_cap) : Json(nullptr);
  if (is_measured) {
    // Nats per bit, and per bit and expected read.
    budget["constraint_multipliers"] = {{"storage", 2 * outcome.allocation.prices.storage},
                                        {"read", 2 * kReadUnits * outcome.allocation.prices.reads}};
  }
  Json guards = Json::object(), kl = Json::object(), additivity = Json::object(), weights = Json::object();
  for (size_t d = 0; d < outcome.problem.allocation.domains.size(); ++d) {
    const AllocationDomain& domain = outcome.problem.allocation.domains[d];
    kl[domain.name] = f.kl[d];
    additivity[domain.name] = domain.additivity;
    weights[domain.name] = domain.weight;
    if (domain.limit) {
      guards[domain.name] = {{"limit", *domain.limit}, {"multiplier", outcome.allocation.prices.guards[d]}};
    }
  }
  if (!guards.empty()) budget["guards"] = std::move(guards);
  doc["prediction"] = {{"kl_mean", f.predicted_kl}, {"kl", kl},          {"dual_bound", f.bound}, {"gap", f.gap},
                       {"additivity", additivity},  {"weights", weights}};
  doc["inputs"] = Json::object();
  for (const auto& [key, value] : inputs) doc["inputs"][key] = value;
  doc["inputs"]["seed"] = request.seed;
  doc["inputs"]["reads"] = request.as_served ? "as served" : "as routed";
  doc["inputs"]["rows"] = request.rows;
  doc["pins"] = Json::array();
  if (is_measured) {
    for (const WidthPin& pin : outcome.problem.pins) doc["pins"].push_back(pin_json(pin));
  }
  return dump_json(doc, 1) + "\n";
}

}  // namespace espalier
