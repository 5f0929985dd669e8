#include "stages/plan/expert_errors.h"

#include <algorithm>
#include <cmath>

namespace espalier {
namespace {

constexpr double kSuperWeight = 0.5;  // domains that can make an expert a super expert; quality.md 2.3

Status known_domains(const PlanInputs& inputs, const std::map<std::string, double>& given, const char* flag) {
  for (const auto& entry : given) {
    const std::string& name = entry.first;
    const double value = entry.second;
    const auto& domains = inputs.table.domains;
    const bool is_known =
        std::any_of(domains.begin(), domains.end(), [&](const SensitivityDomain& d) { return d.name == name; });
    if (is_known && value >= 0 && std::isfinite(value)) continue;
    std::string names;
    for (const SensitivityDomain& d : domains) names += (names.empty() ? "" : ", ") + d.name;
    return invalid_argument(std::string(flag) + ": expected DOMAIN=NUMBER with a number >= 0 and one of " + names +
                            ", found '" + name + "=" + std::to_string(value) + "'");
  }
  return ok_status();
}

}  // namespace

Result<ExpertErrors> ExpertErrors::make(const PlanInputs& inputs, const PlanRequest& request) {
  RETURN_IF_ERROR(known_domains(inputs, request.guards, "--guard"));
  RETURN_IF_ERROR(known_domains(inputs, request.weights, "--weight"));
  ExpertErrors out(inputs);
  out.n_layers_ = inputs.config.n_layers;
  out.per_layer_ = inputs.config.n_experts;
  out.matrix_weights_ = inputs.config.d_model * inputs.config.d_ff;
  const size_t n_domains = inputs.table.domains.size();
  std::vector<size_t> column(n_domains);  // of the routing statistics
  double total = 0;
  for (size_t d = 0; d < n_domains; ++d) {
    const SensitivityDomain& s = inputs.table.domains[d];
    AllocationDomain domain{s.name, s.weight, s.floor, s.additivity, std::nullopt};
    if (const auto it = request.weights.find(s.name); it != request.weights.end()) domain.weight = it->second;
    if (const auto it = request.guards.find(s.name); it != request.guards.end()) domain.limit = it->second;
    total += domain.weight;
    out.domains_.push_back(std::move(domain));
    const auto& names = inputs.routing.domains;
    const auto at = std::find(names.begin(), names.end(), s.name);
    if (at == names.end()) {
      return failed_precondition("plan: the routing statistics have no domain '" + s.name +
                                 "', which the sensitivity table has; calibrate with the same domains");
    }
    column[d] = static_cast<size_t>(at - names.begin());
  }
  if (!(total > 0)) return invalid_argument("--weight: expected at least one weight above 0, found none");

  const std::vector<float>& reads = request.as_served ? inputs.routing.reads_served : inputs.routing.reads_routed;
  if (reads.empty()) {
    return failed_precondition(
        "plan: the routing statistics have no read frequencies as served; calibrate with --expert-top-p");
  }
  const size_t n = static_cast<size_t>(out.n_experts()), stride = inputs.routing.domains.size();
  out.slopes_.resize(n * n_domains);
  out.largest_share_.assign(n, 0);
  for (size_t i = 0; i < n; ++i) {
    const std::vector<double>& slope = inputs.table.layers[i / static_cast<size_t>(out.per_layer_)].slope;
    for (size_t d = 0; d < n_domains; ++d) {
      const auto share = static_cast<double>(inputs.routing.share[i * stride + column[d]]);
      out.slopes_[i * n_domains + d] = slope[d] * share;
      if (out.domains_[d].weight >= kSuperWeight) out.largest_share_[i] = std::max(out.largest_share_[i], share);
    }
    const double once = std::clamp(static_cast<double>(reads[i]), 0.0, 1.0);
    const double distinct = request.rows == 1 ? once : 1 - std::pow(1 - once, static_cast<double>(request.rows));
    out.reads_.push_back(std::llround(distinct * kReadUnits));
  }
  for (AllocationDomain& d : out.domains_) d.weight /= total;
  return out;
}

double ExpertErrors::matrix_error(size_t layer, size_t expert, ExpertMatrix matrix, int k2) const {
  if (k2 == kNativeWidth) return 0;
  const MatrixFactors& f = inputs_->table.factors_of(layer);
  const double factor = (matrix == ExpertMatrix::kW1 ? f.w1 : matrix == ExpertMatrix::kW3 ? f.w3 : f.w2) / f.sum();
  const AmplitudeLaw& law = inputs_->table.law;
  if (inputs_->errors) {
    const MatrixErrors& measured = *inputs_->errors;
    const size_t n_widths = measured.widths.size();
    const size_t row =
        ((layer * static_cast<size_t>(per_layer_) + expert) * kExpertMatrices + static_cast<size_t>(matrix)) * n_widths;
    size_t nearest = n_widths;
    for (size_t w = 0; w < n_widths; ++w) {
      if (std::isnan(measured.error[row + w])) continue;
      if (nearest == n_widths || std::abs(measured.widths[w] - k2) < std::abs(measured.widths[nearest] - k2))
        nearest = w;
    }
    if (nearest < n_widths) {
      const double anchor = static_cast<double>(measured.error[row + nearest]);
      const int at = measured.widths[nearest];
      return factor * (at == k2 ? anchor : anchor * law.error(k2 / 2.0) / law.error(at / 2.0));
    }
  }
  return factor * law.error(k2 / 2.0);
}

double ExpertErrors::expert_error(size_t layer, size_t expert, const ExpertWidths& w) const {
  return matrix_error(layer, expert, ExpertMatrix::kW1, w.w1) + matrix_error(layer, expert, ExpertMatrix::kW3, w.w3) +
         matrix_error(layer, expert, ExpertMatrix::kW2, w.w2);
}

int64_t ExpertErrors::matrix_half_bits(int k2) const {
  return k2 == kNativeWidth ? matrix_weights_ * 17 / 2 : matrix_weights_ * k2;
}

int64_t ExpertErrors::expert_half_bits(const ExpertWidths& w) const {
  return matrix_half_bits(w.w1) + matrix_half_bits(w.w3) + matrix_half_bits(w.w2);
}

double ExpertErrors::largest_share(size_t layer, size_t expert) const {
  return largest_share_[layer * static_cast<size_t>(per_layer_) + expert];
}

Result<AllocationUse> ExpertErrors::use_of(const PackPlan& plan) const {
  // One option per item: the allocator's own sums.
  AllocationProblem fixed;
  fixed.domains = domains_;
  fixed.slopes = slopes_;
  for (size_t layer = 0; layer < static_cast<size_t>(n_layers_); ++layer) {
    const auto it = plan.experts.find(static_cast<int>(layer));
    if (it == plan.experts.end() || it->second.size() != static_cast<size_t>(per_layer_)) {
      return failed_precondition("plan: layer " + std::to_string(layer) + ": expected widths of " +
                                 std::to_string(per_layer_) + " experts, found " +
                                 std::to_string(it == plan.experts.end() ? 0 : it->second.size()));
    }
    for (size_t expert = 0; expert < it->second.size(); ++expert) {
      const ExpertWidths& w = it->second[expert];
      fixed.items.push_back({{{0, expert_half_bits(w), expert_error(layer, expert, w)}}, reads_[fixed.items.size()]});
    }
  }
  return allocation_use(fixed, std::vector<int>(fixed.items.size(), 0));
}

}  // namespace espalier
