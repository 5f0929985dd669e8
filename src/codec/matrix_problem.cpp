#include "codec/matrix_problem.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "codec/viterbi.h"

namespace espalier::codec {
namespace {

constexpr double kDeadInput = 1e-12;  // of the mean diagonal

Status check_weight(const float* weight, int64_t size, int64_t n, const std::string& name) {
  for (int64_t i = 0; i < size; ++i) {
    if (!std::isfinite(weight[i])) {
      return data_loss(name + ": weight[" + std::to_string(i / n) + ", " + std::to_string(i % n) + "] is " +
                       (std::isnan(weight[i]) ? "NaN" : "infinite") +
                       "; expected finite weights, check the checkpoint");
    }
  }
  return ok_status();
}

Status check_hessian(const double* hessian, int64_t k, const std::string& name) {
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < k; ++j) {
      if (!std::isfinite(hessian[i * k + j])) {
        return data_loss(name + ": Hessian[" + std::to_string(i) + ", " + std::to_string(j) +
                         "] is not finite; the calibration activations overflowed");
      }
    }
    if (hessian[i * k + i] < 0) {
      return data_loss(name + ": Hessian[" + std::to_string(i) + ", " + std::to_string(i) +
                       "] is negative; expected X^T X");
    }
  }
  return ok_status();
}

// Symmetric, mean diagonal 1; the identity when there is nothing to use. Divided by its largest diagonal first, so that
// neither huge nor tiny ones leave the range of numbers.
InputHessian normalised_hessian(const double* hessian, int64_t k) {
  InputHessian out;
  HessianUse& use = out.use;
  std::vector<double>& h = out.values;
  h.resize(static_cast<size_t>(k * k));
  double largest = 0;
  for (int64_t i = 0; i < k && hessian != nullptr; ++i) largest = std::max(largest, hessian[i * k + i]);
  use = hessian == nullptr ? HessianUse::kNone : largest > 0 ? HessianUse::kCalibrated : HessianUse::kEmpty;
  if (use != HessianUse::kCalibrated) {
    for (int64_t i = 0; i < k; ++i) h[static_cast<size_t>(i * k + i)] = 1.0;
    return out;
  }
  double mean = 0;
  for (int64_t i = 0; i < k; ++i) mean += hessian[i * k + i] / largest / static_cast<double>(k);
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < k; ++j) {
      h[static_cast<size_t>(i * k + j)] =
          0.5 * (hessian[i * k + j] / largest / mean + hessian[j * k + i] / largest / mean);
    }
    if (h[static_cast<size_t>(i * k + i)] < kDeadInput && out.n_dead++ == 0) out.first_dead = i;
  }
  return out;
}

// Mean diagonal 1. values [n] or, when `full`, [n, n].
Result<std::vector<double>> normalised_output(const double* values, int64_t n, bool full, const std::string& name) {
  const int64_t size = full ? n * n : n;
  for (int64_t i = 0; i < size; ++i) {
    if (!std::isfinite(values[i]))
      return data_loss(name + ": output metric element " + std::to_string(i) + " is not finite");
  }
  double mean = 0;
  for (int64_t j = 0; j < n; ++j) {
    const double d = values[full ? j * n + j : j];
    if (d < 0)
      return data_loss(name + ": output metric of output " + std::to_string(j) +
                       " is negative; expected a sum of squares");
    mean += d / static_cast<double>(n);
  }
  if (!(mean > 0)) return data_loss(name + ": the output metric is zero; leave it out to weigh all outputs the same");
  std::vector<double> out(values, values + size);
  for (double& v : out) v /= mean;
  return out;
}

}  // namespace

Status check_request(int64_t k, int64_t n, const QuantizeOptions& options) {
  if (k <= 0 || n <= 0 || k % kBlock != 0 || n % kBlock != 0) {
    return failed_precondition(options.name + ": expected dimensions that are multiples of 128, found [" +
                               std::to_string(k) + ", " + std::to_string(n) +
                               "]; leave the matrix unquantized or pad it");
  }
  if (!is_width(options.k2)) {
    return invalid_argument(options.name + ": no such width: " + std::to_string(options.k2) + " half bits");
  }
  if (!is_searchable_width(options.k2, options.codebook)) {
    return invalid_argument(options.name + ": " + width_text(options.k2) + " bits need the codebook mul1, found " +
                            std::string(codebook_name(options.codebook)) + "; use mul1 or a whole number of bits");
  }
  if (options.output.diagonal != nullptr && options.output.full != nullptr) {
    return invalid_argument(options.name + ": expected a diagonal or a full output metric, found both");
  }
  if (options.n_cuts != 1 && options.n_cuts != 2 && options.n_cuts != 4) {
    return invalid_argument(options.name + ": expected 1, 2 or 4 cuts, found " + std::to_string(options.n_cuts));
  }
  if (!(options.damping >= 0) || !std::isfinite(options.damping) || !(options.output_damping >= 0) ||
      !std::isfinite(options.output_damping) || options.refit_rounds < 0 || options.descent_sweeps < 0 ||
      options.n_draws < 1 || options.spread_tiles < 0 || !(options.spread >= 0 && options.spread < 100)) {
    return invalid_argument(
        options.name +
        ": damping, output damping, sweeps, refit rounds and spread must not be negative, draws at least 1");
  }
  return ok_status();
}

Result<std::shared_ptr<const InputHessian>> make_input_hessian(const double* hessian, int64_t k,
                                                               const std::string& name) {
  if (hessian != nullptr) RETURN_IF_ERROR(check_hessian(hessian, k, name));
  return std::make_shared<const InputHessian>(normalised_hessian(hessian, k));
}

Result<std::unique_ptr<MatrixProblem>> make_problem(const float* weight, int64_t k, int64_t n,
                                                    std::shared_ptr<const InputHessian> hessian,
                                                    const QuantizeOptions& options, ThreadPool& pool) {
  RETURN_IF_ERROR(check_weight(weight, n * k, n, options.name));
  auto problem = std::make_unique<MatrixProblem>();
  problem->weight = weight;
  problem->k = k;
  problem->n = n;
  problem->hessian = std::move(hessian);
  const std::vector<double>& h = problem->hessian->values;
  for (int64_t i = 0; i < k; ++i) {
    problem->diagonal.push_back(std::max(h[static_cast<size_t>(i * k + i)] + options.damping, 1e-6));
  }
  OutputMetric output;
  if (options.output.full != nullptr) {
    ASSIGN_OR_RETURN(problem->output, normalised_output(options.output.full, n, true, options.name));
    output.full = problem->output.data();
  } else if (options.output.diagonal != nullptr) {
    ASSIGN_OR_RETURN(problem->output, normalised_output(options.output.diagonal, n, false, options.name));
    output.diagonal = problem->output.data();
  }
  for (int64_t j = 0; j < n && !problem->output.empty(); ++j) {
    problem->output_diagonal.push_back(problem->output[static_cast<size_t>(output.full != nullptr ? j * n + j : j)] +
                                       std::max(options.output_damping, 1e-6));
  }
  problem->metric.emplace(weight, k, n, problem->hessian->use == HessianUse::kCalibrated ? h.data() : nullptr, output,
                          options.tier, pool);
  return problem;
}

}  // namespace espalier::codec
