// What a plan is made from: the measured tables, and what was asked for.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model/config.h"
#include "model/pack_plan.h"
#include "model/routing_statistics.h"
#include "model/sensitivity.h"

namespace espalier {

struct PlanInputs {
  Config config;
  Sensitivity table;
  RoutingStatistics routing;
  std::optional<MatrixErrors> errors;  // absent: the amplitude law for every matrix
};

// Matrices of an expert in the order of the files.
enum class ExpertMatrix { kW1, kW3, kW2 };
inline constexpr int kExpertMatrices = 3;

// Widths that a plan must keep. -1 stands for all layers, experts or matrices.
struct WidthPin {
  int first_layer = -1, last_layer = -1;
  int first_expert = -1, last_expert = -1;
  int matrix = -1;  // ExpertMatrix
  int min_k2 = 0;   // half bits; 0: no bound
  int max_k2 = 0;
  std::string reason;

  // "layers 37-39 >= 3 (drafter taps)".
  std::string text() const;
};

// "37-39=3", "3:5=4.5", "0:0-7:w2=2.5": layers, then experts, then the matrix; "*" for all of a kind. `bound`: "min",
// "max" or "pin" (both). Errors: invalid_argument naming the text and what is expected.
Result<WidthPin> parse_pin(std::string_view text, std::string_view bound, const Config& config);

// How the widths are chosen. All but the first are the simple rules that a plan must beat; they know neither pins nor
// read cap.
enum class PlanRule { kMeasured, kUniform, kEndsFirst, kFrequency, kLayer };
std::string_view plan_rule_name(PlanRule rule);
std::optional<PlanRule> plan_rule_from_name(std::string_view name);

// What a bit per weight counts. Source: packs.md 2.1.
enum class BudgetOf {
  kRouted,  // routed experts of the backbone
  kCard,    // and shared experts, attention, compressor, indexer and Engram projection, at PlanRequest::dense_k2
};

struct PlanRequest {
  double bpw = 0;
  BudgetOf budget_of = BudgetOf::kRouted;
  std::optional<double> read_cap;           // bits per weight that a decoded token reads, over routed experts
  std::map<std::string, double> guards;     // domain -> largest KL
  std::map<std::string, double> weights;    // domain -> weight; absent: the table's
  std::vector<int> widths = {4, 6, 8, 10};  // half bits, kNativeWidth among them when experts may stay native
  bool per_matrix = false;                  // else one width per expert
  bool ties_gate_up = true;                 // w1 and w3 alike
  std::vector<WidthPin> pins;
  double super_share =
      0.20;  // an expert with this share of its layer's output in a domain of weight >= 0.5 is pinned; 0: none is
  int super_k2 = 10;                                 // to at least this width, or the widest there is; native counts
  bool as_served = false;                            // read frequencies with pruned experts
  int64_t rows = 1;                                  // tokens per step: distinct experts count once
  std::optional<int> dense_k2, head_k2, drafter_k2;  // absent: the plan does not say
  PlanRule rule = PlanRule::kMeasured;
  uint64_t seed = 0;  // of the uniform mix
};

}  // namespace espalier
