// What all draws of signs of one matrix share: the checked and normalised Hessian and output metric. Internal to the
// quantizer.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "codec/error_metric.h"
#include "codec/quantizer.h"

namespace espalier::codec {

// Of inputs [k]; matrices with the same input share it.
struct InputHessian {
  std::vector<double> values;  // [k, k], symmetric, mean diagonal 1; the identity without a usable Hessian
  HessianUse use = HessianUse::kCalibrated;
  int64_t n_dead = 0;  // inputs without activity
  int64_t first_dead = -1;
};

struct MatrixProblem {
  const float* weight = nullptr;  // [k, n]
  int64_t k = 0;
  int64_t n = 0;
  std::shared_ptr<const InputHessian> hessian;
  std::vector<double> diagonal;         // [k], damped, positive
  std::vector<double> output;           // output metric, mean diagonal 1: [n], [n, n], or empty
  std::vector<double> output_diagonal;  // [n], damped, positive; empty without an output metric
  std::optional<ErrorMetric> metric;    // points into this struct and the weight
};

// Dimensions and options. Errors: failed_precondition and invalid_argument, naming options.name.
Status check_request(int64_t k, int64_t n, const QuantizeOptions& options);

// hessian [k, k] or null. Errors: data_loss for elements that are not finite and for a negative diagonal.
Result<std::shared_ptr<const InputHessian>> make_input_hessian(const double* hessian, int64_t k,
                                                               const std::string& name);

// Errors: data_loss for weights or an output metric that are not finite.
Result<std::unique_ptr<MatrixProblem>> make_problem(const float* weight, int64_t k, int64_t n,
                                                    std::shared_ptr<const InputHessian> hessian,
                                                    const QuantizeOptions& options, ThreadPool& pool);

}  // namespace espalier::codec
