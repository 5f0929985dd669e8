#include "codec/quantizer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "codec/block_ldl.h"
#include "codec/column_encoder.h"
#include "codec/matrix_problem.h"
#include "codec/rotated_problem.h"
#include "codec/spread_search.h"
#include "codec/viterbi.h"
#include "codec/weight_scales.h"
#include "tensor/float_formats.h"

namespace espalier::codec {
namespace {

constexpr int kMaxRetries = 10;

SearchOptions search_options(const QuantizeOptions& options) {
  SearchOptions search;
  search.codebook = options.codebook;
  search.k2 = options.k2;
  search.n_cuts = options.n_cuts;
  search.tier = options.tier;
  return search;
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

Result<WeightScales> draw_scales(const MatrixProblem& problem, const QuantizeOptions& options, int draw,
                                 double spread) {
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
Result<std::vector<SideMetric>> output_sides(const MatrixProblem& problem, const QuantizeOptions& options,
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

void record_fallbacks(const MatrixProblem& problem, const WeightScales& scales, QuantizedMatrix* result) {
  const auto add = [&](const char* reason, int64_t count, int64_t first) {
    if (count > 0) result->fallbacks.push_back({reason, count, first});
  };
  const InputHessian& hessian = *problem.hessian;
  if (hessian.use == HessianUse::kNone) result->fallbacks.push_back({"no Hessian: all inputs count the same"});
  if (hessian.use == HessianUse::kEmpty) result->fallbacks.push_back({"Hessian of zeros: all inputs count the same"});
  add("inputs without calibration activity: weighed by damping alone", hessian.n_dead, hessian.first_dead);
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
Result<QuantizedMatrix> encode_draw(const MatrixProblem& problem, const QuantizeOptions& options, int draw,
                                    ThreadPool& pool) {
  const int64_t k = problem.k;
  const int64_t n = problem.n;
  QuantizedMatrix result;
  result.hessian = problem.hessian->use;
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
    const double factor = best_spread_factor(rotate_weight(problem.weight, k, n, scales, pool), k, n,
                                             options.spread_tiles, search_options(options), pool);
    ASSIGN_OR_RETURN(scales, draw_scales(problem, options, draw, spread * factor));
    tensor.suh = scales.suh;
    tensor.svh = scales.svh;
  }
  ASSIGN_OR_RETURN(const SideMetric input, rotated_side(problem.hessian->values, "Hessian", scales.su, scales.suh,
                                                        options, result.damping, pool));
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

// The draw with the least error.
Result<QuantizedMatrix> encode_best(const MatrixProblem& problem, const QuantizeOptions& options, ThreadPool& pool) {
  ASSIGN_OR_RETURN(QuantizedMatrix best, encode_draw(problem, options, 0, pool));
  for (int draw = 1; draw < options.n_draws; ++draw) {
    ASSIGN_OR_RETURN(QuantizedMatrix other, encode_draw(problem, options, draw, pool));
    other.draw = draw;
    if (other.weighted_error < best.weighted_error) best = std::move(other);
  }
  return best;
}

// Columns [first, first + n) of a tensor.
Exl3Tensor columns_of(const Exl3Tensor& all, int64_t first, int64_t n) {
  Exl3Tensor part;
  part.k = all.k;
  part.n = n;
  part.k2 = all.k2;
  part.codebook = all.codebook;
  part.suh = all.suh;
  part.svh.assign(all.svh.begin() + first, all.svh.begin() + first + n);
  const int64_t words = tile_words(all.k2);
  const int64_t row_words = n / kTile * words;
  part.trellis.resize(static_cast<size_t>(all.k / kTile * row_words));
  for (int64_t b = 0; b < all.k / kTile; ++b) {
    const uint16_t* from = all.trellis.data() + (b * (all.n / kTile) + first / kTile) * words;
    std::copy(from, from + row_words, part.trellis.begin() + b * row_words);
  }
  return part;
}

}  // namespace

std::string fallback_text(const Fallback& fallback) {
  if (fallback.count == 0) return fallback.reason;
  const std::string from = fallback.first >= 0 ? " from index " + std::to_string(fallback.first) + " on" : "";
  return fallback.reason + " (" + std::to_string(fallback.count) + from + ")";
}

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
  RETURN_IF_ERROR(check_request(k, n, options));
  ASSIGN_OR_RETURN(const auto shared, make_input_hessian(hessian, k, options.name));
  ASSIGN_OR_RETURN(const auto problem, make_problem(weight, k, n, shared, options, pool));
  return encode_best(*problem, options, pool);
}

Result<std::vector<QuantizedMatrix>> quantize_with_shared_inputs(const std::vector<SharedInputMatrix>& matrices,
                                                                 int64_t k, const double* hessian,
                                                                 const QuantizeOptions& options, ThreadPool& pool) {
  CHECK(!matrices.empty() && options.output.diagonal == nullptr && options.output.full == nullptr);
  QuantizeOptions joint = options;
  joint.name.clear();
  int64_t n = 0;
  for (const SharedInputMatrix& m : matrices) {
    joint.name += (joint.name.empty() ? "" : "+") + m.name;
    QuantizeOptions own = options;
    own.name = m.name;
    RETURN_IF_ERROR(check_request(k, m.n, own));
    n += m.n;
  }
  std::vector<float> weight(static_cast<size_t>(k * n));
  for (int64_t i = 0; i < k; ++i) {
    float* to = weight.data() + i * n;
    for (const SharedInputMatrix& m : matrices) to = std::copy(m.weight + i * m.n, m.weight + (i + 1) * m.n, to);
  }
  ASSIGN_OR_RETURN(const auto shared, make_input_hessian(hessian, k, joint.name));
  ASSIGN_OR_RETURN(const auto problem, make_problem(weight.data(), k, n, shared, joint, pool));
  ASSIGN_OR_RETURN(const QuantizedMatrix all, encode_best(*problem, joint, pool));

  std::vector<QuantizedMatrix> out;
  int64_t first = 0;
  for (const SharedInputMatrix& m : matrices) {
    QuantizedMatrix q = all;  // for what concerns the inputs
    q.tensor = columns_of(all.tensor, first, m.n);
    std::vector<float> decoded(static_cast<size_t>(k * m.n));
    decode_weight(q.tensor.view(), decoded.data(), pool);
    const ErrorMetric metric(m.weight, k, m.n, shared->use == HessianUse::kCalibrated ? shared->values.data() : nullptr,
                             OutputMetric(), options.tier, pool);
    const ErrorMeasures measures = metric.measure(decoded.data(), pool);
    q.true_error = measures.true_error;
    q.relative_mse = measures.relative_mse;
    q.weighted_error = measures.weighted_error;
    q.n_zero_columns =
        std::count_if(q.tensor.svh.begin(), q.tensor.svh.end(), [](uint16_t s) { return (s & 0x7FFFu) == 0; });
    first += m.n;
    out.push_back(std::move(q));
  }
  return out;
}

}  // namespace espalier::codec
