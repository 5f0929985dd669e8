#include "codec/quantizer.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "codec/block_ldl.h"
#include "codec/column_encoder.h"
#include "codec/error_metric.h"
#include "codec/rotated_problem.h"
#include "codec/viterbi.h"
#include "codec/weight_scales.h"
#include "tensor/float_formats.h"

namespace espalier::codec {
namespace {

constexpr int kMaxRetries = 10;
constexpr double kDeadInput = 1e-12;  // of the mean diagonal

Status check_request(const float* weight, int64_t k, int64_t n, const QuantizeOptions& options) {
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
  for (int64_t i = 0; i < k * n; ++i) {
    if (!std::isfinite(weight[i])) {
      return data_loss(options.name + ": weight[" + std::to_string(i / n) + ", " + std::to_string(i % n) + "] is " +
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
std::vector<double> normalised_hessian(const double* hessian, int64_t k, HessianUse& use) {
  std::vector<double> h(static_cast<size_t>(k * k));
  double largest = 0;
  for (int64_t i = 0; i < k && hessian != nullptr; ++i) largest = std::max(largest, hessian[i * k + i]);
  use = hessian == nullptr ? HessianUse::kNone : largest > 0 ? HessianUse::kCalibrated : HessianUse::kEmpty;
  if (use != HessianUse::kCalibrated) {
    for (int64_t i = 0; i < k; ++i) h[static_cast<size_t>(i * k + i)] = 1.0;
    return h;
  }
  double mean = 0;
  for (int64_t i = 0; i < k; ++i) mean += hessian[i * k + i] / largest / static_cast<double>(k);
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < k; ++j) {
      h[static_cast<size_t>(i * k + j)] =
          0.5 * (hessian[i * k + j] / largest / mean + hessian[j * k + i] / largest / mean);
    }
  }
  return h;
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

// What all draws of signs share.
struct Problem {
  const float* weight = nullptr;
  int64_t k = 0;
  int64_t n = 0;
  std::vector<double> hessian;  // normalised
  HessianUse use = HessianUse::kCalibrated;
  std::vector<double> diagonal;         // damped, positive
  std::vector<double> output;           // normalised output metric: [n], [n, n], or empty
  std::vector<double> output_diagonal;  // damped, positive; empty without an output metric
  std::optional<ErrorMetric> metric;
};

SearchOptions search_options(const QuantizeOptions& options) {
  SearchOptions search;
  search.codebook = options.codebook;
  search.k2 = options.k2;
  search.n_cuts = options.n_cuts;
  search.tier = options.tier;
  return search;
}

// By what to multiply the spread of the rotated weight: the least relative error of sample tiles at three factors, by a
// parabola.
double best_spread_factor(const std::vector<double>& w, int64_t k, int64_t n, const QuantizeOptions& options,
                          ThreadPool& pool) {
  constexpr double kStep = 0.06;
  constexpr double kFeedback = 1.02;  // by how much error feedback widens the targets
  const int64_t n_tiles = options.spread_tiles;
  std::vector<double> errors(static_cast<size_t>(3 * n_tiles));
  const SearchOptions search = search_options(options);
  pool.parallel_for(3 * n_tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      const int64_t tile = at / 3;
      const int64_t b = tile * (k / kTile) / n_tiles;  // spread over the rows, walking along the columns
      const int64_t s = 5 * tile % (n / kTile);
      const double factor = kFeedback * (1 + kStep * static_cast<double>(at % 3 - 1));
      float target[kTileSize];
      uint16_t states[kTileSize];
      for (int p = 0; p < kTileSize; ++p) {
        const int e = ring_to_row_major()[p];
        target[p] = static_cast<float>(std::clamp(
            factor * w[static_cast<size_t>((b * kTile + e / kTile) * n + s * kTile + e % kTile)], -1e6, 1e6));
      }
      search_tile(target, search, states);
      errors[static_cast<size_t>(at)] = tile_error(target, states, options.codebook) / (factor * factor);
    }
  });
  double sum[3] = {};
  for (size_t at = 0; at < errors.size(); ++at) sum[at % 3] += errors[at];
  const double curvature = sum[0] - 2 * sum[1] + sum[2];
  const double offset = curvature > 0 ? 0.5 * (sum[0] - sum[2]) / curvature : sum[0] < sum[2] ? -1.0 : 1.0;
  return 1 + kStep * std::clamp(offset, -1.0, 1.0);
}

// A side of the objective in the rotated basis, positive definite by damping, which grows until the factorisation
// succeeds.
Result<SideMetric> rotated_side(const std::vector<double>& metric, const std::string& what,
                                const std::vector<double>& magnitudes, const std::vector<uint16_t>& signed_scales,
                                const QuantizeOptions& options, double& damping, ThreadPool& pool) {
  SideMetric side;
  side.size = static_cast<int64_t>(magnitudes.size());
  const double step = std::max(2 * damping, 0.01);
  for (int retry = 0;; ++retry) {
    side.metric = rotate_metric(metric, damping, magnitudes, signed_scales, pool);
    std::vector<double> factor = side.metric;
    if (cholesky_upper(factor.data(), side.size, pool, options.tier)) {
      side.feedback = block_ldl_feedback(factor.data(), side.size, pool);
      if (options.descent_sweeps > 0) prepare_descent(&side);
      return side;
    }
    if (retry == kMaxRetries) {
      return failed_precondition(options.name + ": the " + what + " is not positive definite even with damping " +
                                 std::to_string(damping) +
                                 " of its mean diagonal; expected X^T X of finite activations");
    }
    damping += step;
  }
}

Result<WeightScales> draw_scales(const Problem& problem, const QuantizeOptions& options, int draw, double spread) {
  ScaleRequest request;
  request.weight = problem.weight;
  request.k = problem.k;
  request.n = problem.n;
  request.diagonal = problem.diagonal.data();
  if (!problem.output_diagonal.empty()) request.output_diagonal = problem.output_diagonal.data();
  request.spread = spread;
  request.rule = options.scale_rule;
  request.two_sided = options.two_sided;
  request.seed = options.seed;
  request.name = options.name;
  if (draw > 0) request.name += "#" + std::to_string(draw);
  return choose_scales(request);
}

// The output sides of the column groups: one per 128 columns, or a single one when a full output metric couples all
// columns.
Result<std::vector<SideMetric>> output_sides(const Problem& problem, const QuantizeOptions& options,
                                             const WeightScales& scales, ThreadPool& pool) {
  std::vector<SideMetric> sides;
  const bool full = problem.output.size() > static_cast<size_t>(problem.n);
  const int64_t width = full ? problem.n : kBlock;
  for (int64_t first = 0; first < problem.n; first += width) {
    std::vector<double> metric(static_cast<size_t>(width * width));
    if (full) metric = problem.output;
    for (int64_t j = 0; j < width && !full; ++j) {
      metric[static_cast<size_t>(j * width + j)] =
          problem.output.empty() ? 1.0 : problem.output[static_cast<size_t>(first + j)];
    }
    double damping = problem.output.empty() ? 0.0 : options.output_damping;
    ASSIGN_OR_RETURN(
        SideMetric side,
        rotated_side(metric, "output metric", {scales.sv.begin() + first, scales.sv.begin() + first + width},
                     {scales.svh.begin() + first, scales.svh.begin() + first + width}, options, damping, pool));
    sides.push_back(std::move(side));
  }
  return sides;
}

void encode_all(const ColumnProblem& common, const std::vector<SideMetric>& outputs, Exl3Tensor& tensor,
                ThreadPool& pool) {
  const int64_t width = outputs.empty() ? kTile : outputs.front().size;
  const int64_t n_groups = common.n / width;
  const auto encode = [&](int64_t group) {
    ColumnProblem problem = common;
    problem.first = group * width;
    problem.width = width;
    problem.output = outputs.empty() ? nullptr : &outputs[static_cast<size_t>(group)];
    encode_columns(problem, tensor, pool);
  };
  if (n_groups >= pool.n_threads()) {  // else the antidiagonals of one group after another are spread over the threads
    pool.parallel_for(n_groups, 1, [&](int64_t begin, int64_t end) {
      for (int64_t group = begin; group < end; ++group) encode(group);
    });
  } else {
    for (int64_t group = 0; group < n_groups; ++group) encode(group);
  }
}

void record_fallbacks(const Problem& problem, const WeightScales& scales, QuantizedMatrix* result) {
  const auto add = [&](const char* reason, int64_t count, int64_t first) {
    if (count > 0) result->fallbacks.push_back({reason, count, first});
  };
  if (problem.use == HessianUse::kNone) result->fallbacks.push_back({"no Hessian: all inputs count the same"});
  if (problem.use == HessianUse::kEmpty) result->fallbacks.push_back({"Hessian of zeros: all inputs count the same"});
  int64_t n_dead = 0, first_dead = -1;
  for (int64_t i = 0; i < problem.k; ++i) {
    if (problem.hessian[static_cast<size_t>(i * problem.k + i)] < kDeadInput && n_dead++ == 0) first_dead = i;
  }
  add("inputs without calibration activity: weighed by damping alone", n_dead, first_dead);
  if (scales.is_zero) return;
  const auto zeros = [&](const std::vector<uint16_t>& stored, const char* reason, int64_t n_zero, int64_t n_lost) {
    const auto first = std::find_if(stored.begin(), stored.end(), [](uint16_t s) { return (s & 0x7FFFu) == 0; });
    if (n_zero > n_lost) add(reason, n_zero - n_lost, n_lost == 0 ? first - stored.begin() : -1);
  };
  zeros(scales.suh, "inputs without weights: scale 0", scales.n_zero_rows, scales.n_lost_rows);
  zeros(scales.svh, "outputs without weights: scale 0", scales.n_zero_columns, scales.n_lost_columns);
  add("input scales below the range of fp16: rows stored as zeros", scales.n_lost_rows, scales.first_lost_row);
  add("output scales below the range of fp16: columns stored as zeros", scales.n_lost_columns,
      scales.first_lost_column);
}

// One draw of signs: scales, search, refit, measure.
Result<QuantizedMatrix> encode_draw(const Problem& problem, const QuantizeOptions& options, int draw,
                                    ThreadPool& pool) {
  const int64_t k = problem.k;
  const int64_t n = problem.n;
  QuantizedMatrix result;
  result.hessian = problem.use;
  result.damping = options.damping;
  const double spread = options.spread > 0 ? options.spread : best_spread(options.codebook, options.k2);
  ASSIGN_OR_RETURN(WeightScales scales, draw_scales(problem, options, draw, spread));
  Exl3Tensor& tensor = result.tensor;
  tensor.k = k;
  tensor.n = n;
  tensor.k2 = options.k2;
  tensor.codebook = options.codebook;
  tensor.suh = scales.suh;
  tensor.svh = scales.svh;
  tensor.trellis.assign(static_cast<size_t>(trellis_words(k, n, options.k2)), 0);
  result.n_zero_rows = scales.n_zero_rows;
  result.n_zero_columns = scales.n_zero_columns;
  record_fallbacks(problem, scales, &result);
  if (scales.is_zero) {  // all zero, or below what fp16 scales can hold: decodes to zeros, so everything that was there
                         // is lost
    const float* w = problem.weight;
    const bool had_weights = std::any_of(w, w + k * n, [](float x) { return x != 0.0f; });
    result.true_error = result.relative_mse = result.weighted_error = had_weights ? 1.0 : 0.0;
    result.fallbacks.push_back(
        {had_weights ? "weights below the range of fp16 scales: stored as zeros" : "no weights: stored as zeros"});
    return result;
  }

  if (options.spread_tiles > 0) {
    const double factor = best_spread_factor(rotate_weight(problem.weight, k, n, scales, pool), k, n, options, pool);
    ASSIGN_OR_RETURN(scales, draw_scales(problem, options, draw, spread * factor));
    tensor.suh = scales.suh;
    tensor.svh = scales.svh;
  }
  ASSIGN_OR_RETURN(const SideMetric input,
                   rotated_side(problem.hessian, "Hessian", scales.su, scales.suh, options, result.damping, pool));
  if (result.damping > options.damping) result.fallbacks.push_back({"Hessian not positive definite: damping raised"});
  std::vector<SideMetric> outputs;
  if (options.two_sided) {
    ASSIGN_OR_RETURN(outputs, output_sides(problem, options, scales, pool));
  }
  const std::vector<double> w = rotate_weight(problem.weight, k, n, scales, pool);
  ColumnProblem columns;
  columns.weight = w.data();
  columns.k = k;
  columns.n = n;
  columns.input = &input;
  columns.descent_sweeps = options.descent_sweeps;
  columns.search = search_options(options);
  encode_all(columns, outputs, tensor, pool);

  std::vector<float> decoded(static_cast<size_t>(k * n));
  decode_weight(tensor.view(), decoded.data(), pool);
  ErrorMeasures measures = problem.metric->measure(decoded.data(), pool);
  if (options.refit_rounds > 0) {
    Exl3Tensor refitted = tensor;
    problem.metric->refit_scales(result.damping, options.refit_rounds, refitted, pool);
    decode_weight(refitted.view(), decoded.data(), pool);
    const ErrorMeasures after = problem.metric->measure(decoded.data(), pool);
    if (after.weighted_error < measures.weighted_error) {
      measures = after;
      tensor = std::move(refitted);
    }
  }
  result.true_error = measures.true_error;
  result.relative_mse = measures.relative_mse;
  result.weighted_error = measures.weighted_error;
  return result;
}

}  // namespace

std::string_view hessian_use_name(HessianUse use) {
  switch (use) {
    case HessianUse::kCalibrated:
      return "calibrated";
    case HessianUse::kNone:
      return "none";
    case HessianUse::kEmpty:
      return "empty";
  }
  return "unknown";
}

Result<QuantizedMatrix> quantize_matrix(const float* weight, int64_t k, int64_t n, const double* hessian,
                                        const QuantizeOptions& options, ThreadPool& pool) {
  RETURN_IF_ERROR(check_request(weight, k, n, options));
  if (hessian != nullptr) RETURN_IF_ERROR(check_hessian(hessian, k, options.name));
  Problem problem;
  problem.weight = weight;
  problem.k = k;
  problem.n = n;
  problem.hessian = normalised_hessian(hessian, k, problem.use);
  for (int64_t i = 0; i < k; ++i) {
    problem.diagonal.push_back(std::max(problem.hessian[static_cast<size_t>(i * k + i)] + options.damping, 1e-6));
  }
  OutputMetric output;
  if (options.output.full != nullptr) {
    ASSIGN_OR_RETURN(problem.output, normalised_output(options.output.full, n, true, options.name));
    output.full = problem.output.data();
  } else if (options.output.diagonal != nullptr) {
    ASSIGN_OR_RETURN(problem.output, normalised_output(options.output.diagonal, n, false, options.name));
    output.diagonal = problem.output.data();
  }
  for (int64_t j = 0; j < n && !problem.output.empty(); ++j) {
    problem.output_diagonal.push_back(problem.output[static_cast<size_t>(output.full != nullptr ? j * n + j : j)] +
                                      std::max(options.output_damping, 1e-6));
  }
  problem.metric.emplace(weight, k, n, problem.use == HessianUse::kCalibrated ? problem.hessian.data() : nullptr,
                         output, options.tier, pool);
  ASSIGN_OR_RETURN(QuantizedMatrix best, encode_draw(problem, options, 0, pool));
  for (int draw = 1; draw < options.n_draws; ++draw) {
    ASSIGN_OR_RETURN(QuantizedMatrix other, encode_draw(problem, options, draw, pool));
    other.draw = draw;
    if (other.weighted_error < best.weighted_error) best = std::move(other);
  }
  return best;
}

}  // namespace espalier::codec
