// Error and importance of every expert as the tables give them: what the allocator's items are made of, and what any
// plan is judged by.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "stages/plan/allocation.h"
#include "stages/plan/plan_inputs.h"

namespace espalier {

// Reads are kept in fixed point of this many units per read.
inline constexpr double kReadUnits = 0x1p30;

class ExpertErrors {
 public:
  // Errors: failed_precondition when the routing statistics lack a domain of the table, or read frequencies as served
  // are asked for and were not measured; invalid_argument for a guard or weight of a domain that the table lacks, or
  // weights that are all 0.
  static Result<ExpertErrors> make(const PlanInputs& inputs, const PlanRequest& request);

  int64_t n_experts() const { return n_layers_ * per_layer_; }
  int64_t matrix_weights() const { return matrix_weights_; }  // of w1, w3 and w2 alike

  // Share of the expert's relative squared output error that one matrix at a width makes: its factor over the sum of
  // the three, times its error. Measured where the library has the width, else the law through the nearest width that
  // it has. 0 for kNativeWidth.
  double matrix_error(size_t layer, size_t expert, ExpertMatrix matrix, int k2) const;
  double expert_error(size_t layer, size_t expert, const ExpertWidths& widths) const;
  // Storage of one matrix; kNativeWidth: MXFP4's 4.25 bits per weight.
  int64_t matrix_half_bits(int k2) const;
  int64_t expert_half_bits(const ExpertWidths& widths) const;

  // Domains with weights that sum to 1, floors, additivity and guards.
  const std::vector<AllocationDomain>& domains() const { return domains_; }
  // [n_layers * n_experts, n_domains] slope_{l,d} * share_{l,e,d}.
  const std::vector<double>& slopes() const { return slopes_; }
  // [n_layers * n_experts] expected reads per step in kReadUnits.
  const std::vector<int64_t>& reads() const { return reads_; }
  // The largest share in a domain whose weight, as given, is at least 0.5.
  double largest_share(size_t layer, size_t expert) const;

  // Predicted KL and use of a plan that has every routed expert. Errors: failed_precondition when it lacks a layer.
  Result<AllocationUse> use_of(const PackPlan& plan) const;

 private:
  explicit ExpertErrors(const PlanInputs& inputs) : inputs_(&inputs) {}
  const PlanInputs* inputs_;
  int64_t n_layers_ = 0, per_layer_ = 0, matrix_weights_ = 0;
  std::vector<AllocationDomain> domains_;
  std::vector<double> slopes_;
  std::vector<int64_t> reads_;
  std::vector<double> largest_share_;
};

}  // namespace espalier
