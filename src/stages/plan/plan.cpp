#include "stages/plan/plan.h"

#include <algorithm>
#include <cmath>

#include "model/names.h"
#include "stages/plan/rules.h"

namespace espalier {
namespace {

constexpr int64_t kSplitBlock = 128;  // the rotations' block: no split inside one

struct Machine {
  const char* name;
  int ranks;
  double bytes_per_second;  // of one rank
};
// Source: the vendors' data sheets; issue 6 names the two.
constexpr Machine kMachines[] = {{"GB10", 1, 273e9}, {"GB10", 2, 273e9}, {"H200", 1, 4.8e12}};

// Part of `size` channels that the first of `ranks` machines holds, in whole blocks.
double first_share(int64_t size, int ranks) {
  const int64_t blocks = std::max<int64_t>(1, (size + kSplitBlock - 1) / kSplitBlock);
  return static_cast<double>((blocks + ranks - 1) / ranks) / static_cast<double>(blocks);
}

bool is_split(const MatrixSpec& m) {
  switch (m.kind) {
    case MatrixKind::kSharedW1:
    case MatrixKind::kSharedW2:
    case MatrixKind::kSharedW3:
    case MatrixKind::kWqB:
    case MatrixKind::kWoA:
    case MatrixKind::kWoB:
    case MatrixKind::kHead:
      return true;
    default:
      return false;
  }
}

// Trellis and fp16 scale vectors.
double matrix_bytes(const MatrixSpec& m, int k2) {
  return static_cast<double>(m.in * m.out) * k2 / 16.0 + 2.0 * static_cast<double>(m.in + m.out);
}

// Bytes of the backbone's matrices other than routed experts, on the first of `ranks` machines; empty when a width is
// not said.
std::optional<double> dense_bytes(const Config& config, const PlanRequest& request, int ranks) {
  if (!request.dense_k2 || !request.head_k2) return std::nullopt;
  double out = 0;
  for (const MatrixSpec& m : quantizable_matrices(config)) {
    const std::string_view part = matrix_part(m, config.n_layers);
    if (part == "routed" || part == "drafter") continue;
    const double bytes = matrix_bytes(m, part == "head" ? *request.head_k2 : *request.dense_k2);
    const int64_t cut = m.kind == MatrixKind::kWoB || m.kind == MatrixKind::kSharedW2 ? m.in : m.out;
    const double share = m.kind == MatrixKind::kWoA ? static_cast<double>((config.o_groups + ranks - 1) / ranks) /
                                                          static_cast<double>(config.o_groups)
                                                    : first_share(cut, ranks);
    out += bytes * (is_split(m) ? share : 1);
  }
  return out;
}

void set_dense_widths(const PlanInputs& inputs, const PlanRequest& request, PackPlan& plan) {
  if (request.dense_k2) {
    for (const char* part : {"attention", "shared", "index", "engram"}) plan.dense[part] = *request.dense_k2;
  }
  if (request.head_k2) plan.dense["head"] = *request.head_k2;
  if (request.drafter_k2) {
    plan.dense["drafter_dense"] = *request.drafter_k2;
    for (int stage = 0; stage < inputs.config.drafter.n_stages; ++stage) {
      const int k2 = *request.drafter_k2;
      plan.experts[inputs.config.n_layers + stage].assign(static_cast<size_t>(inputs.config.drafter.n_experts),
                                                          {k2, k2, k2});
    }
  }
}

}  // namespace

Result<PlanFigures> plan_figures(const PlanInputs& inputs, const PlanRequest& request, const ExpertErrors& errors,
                                 const PackPlan& plan) {
  ASSIGN_OR_RETURN(const AllocationUse use, errors.use_of(plan));
  PlanFigures out;
  out.predicted_kl = use.objective;
  out.kl = use.kl;
  out.half_bits = use.half_bits;
  const int64_t expert_weights = kExpertMatrices * errors.matrix_weights();
  const auto weights = static_cast<double>(errors.n_experts() * expert_weights);
  ReadBits reads = 0;
  for (const int64_t r : errors.reads()) reads += static_cast<ReadBits>(r) * expert_weights;
  out.bpw_routed = static_cast<double>(use.half_bits) / 2 / weights;
  if (reads > 0) out.bpw_read = static_cast<double>(use.reads) / 2 / static_cast<double>(reads);
  if (request.dense_k2) {
    const auto dense = static_cast<double>(card_dense_weights(inputs.config));
    out.bpw_card = (static_cast<double>(use.half_bits) + dense * *request.dense_k2) / 2 / (weights + dense);
  }
  // A native expert has its scales in its 4.25 bits.
  const double scales = 2.0 * kExpertMatrices * static_cast<double>(inputs.config.d_model + inputs.config.d_ff);
  double scale_bytes = 0, scale_reads = 0;
  size_t item = 0;
  for (int layer = 0; layer < inputs.config.n_layers; ++layer) {
    for (const ExpertWidths& w : plan.experts.at(layer)) {
      const bool has_scales = w.w1 != kNativeWidth;
      scale_bytes += has_scales ? scales : 0;
      scale_reads += has_scales ? scales * static_cast<double>(errors.reads()[item]) / kReadUnits : 0;
      ++item;
    }
  }
  out.routed_bytes = static_cast<double>(use.half_bits) / 16 + scale_bytes;
  const double read_bytes = static_cast<double>(use.reads) / kReadUnits / 16 + scale_reads;
  out.dense_bytes = dense_bytes(inputs.config, request, 1);
  for (const int ranks : {1, 2}) {
    out.rank_bytes[ranks] = out.routed_bytes * first_share(inputs.config.d_ff, ranks) +
                            dense_bytes(inputs.config, request, ranks).value_or(0);
  }
  for (const Machine& m : kMachines) {
    const double bytes = read_bytes * first_share(inputs.config.d_ff, m.ranks) +
                         dense_bytes(inputs.config, request, m.ranks).value_or(0);
    out.ceilings.push_back(
        {m.name, m.ranks, bytes, bytes > 0 ? m.bytes_per_second * static_cast<double>(request.rows) / bytes : 0});
  }
  return out;
}

Result<PlanOutcome> make_plan(const PlanInputs& inputs, const PlanRequest& request) {
  ASSIGN_OR_RETURN(const ExpertErrors errors, ExpertErrors::make(inputs, request));
  PlanOutcome out;
  ASSIGN_OR_RETURN(out.problem, make_expert_problem(inputs, request, errors));
  ASSIGN_OR_RETURN(out.allocation, allocate(out.problem.allocation));
  const int64_t limit = out.problem.allocation.storage_limit;
  if (request.rule == PlanRule::kMeasured) {
    out.plan = out.problem.plan(out.allocation.choice, inputs.config);
  } else {
    ASSIGN_OR_RETURN(out.plan, plan_by_rule(request.rule, inputs, request, errors, limit));
  }
  ASSIGN_OR_RETURN(out.figures, plan_figures(inputs, request, errors, out.plan));
  out.figures.bound = std::min(out.allocation.dual_bound, out.figures.predicted_kl);
  if (out.figures.predicted_kl > 0) out.figures.gap = 1 - out.figures.bound / out.figures.predicted_kl;
  for (const PlanRule rule : {PlanRule::kUniform, PlanRule::kEndsFirst, PlanRule::kFrequency, PlanRule::kLayer}) {
    const auto plan = plan_by_rule(rule, inputs, request, errors, limit);
    if (!plan.ok()) continue;  // the narrowest width alone does not fit: nothing to compare with
    ASSIGN_OR_RETURN(out.rules[rule], plan_figures(inputs, request, errors, *plan));
  }
  set_dense_widths(inputs, request, out.plan);
  out.plan.storage_bpw = out.figures.bpw_routed;
  out.plan.read_bpw = out.figures.bpw_read;
  return out;
}

Result<std::vector<BudgetPoint>> budget_curve(const PlanInputs& inputs, const PlanRequest& request,
                                              const std::vector<double>& budgets) {
  PlanRequest at = request;
  at.guards.clear();
  ASSIGN_OR_RETURN(const ExpertErrors errors, ExpertErrors::make(inputs, at));
  std::vector<BudgetPoint> out;
  for (const double bpw : budgets) {
    at.bpw = bpw;
    const auto problem = make_expert_problem(inputs, at, errors);
    if (!problem.ok()) continue;  // below what the pins or the narrowest widths take
    const auto found = allocate(problem->allocation);
    const auto uniform = plan_by_rule(PlanRule::kUniform, inputs, at, errors, problem->allocation.storage_limit);
    if (!found.ok() || !uniform.ok()) continue;
    ASSIGN_OR_RETURN(const AllocationUse use, errors.use_of(*uniform));
    out.push_back({bpw, found->use.objective, use.objective});
  }
  return out;
}

}  // namespace espalier
