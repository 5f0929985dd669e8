// The objective tr(E^T H E G) of a matrix in its original basis: measured, and lowered by better scales for a fixed
// trellis. Internal, except measure_error, which quantizer.h declares.
//
// One round of refit solves least squares for the output scales, then for the input scales (one k x k system), under
// the damped Hessian. Without an output metric G, or with a diagonal one, an output scale has a closed form; a full G
// couples them in one n x n system. fp64 in fixed order; the scales are rounded to fp16 after each half. Source:
// docs/formats/exl3.md, "Refit".
#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.h"
#include "codec/exl3_tensor.h"
#include "codec/quantizer.h"

namespace espalier::codec {

class ErrorMetric {
 public:
  // weight [k, n], hessian [k, k] (null: identity) and what `output` points at must outlive the metric.
  ErrorMetric(const float* weight, int64_t k, int64_t n, const double* hessian, const OutputMetric& output,
              SimdTier tier, ThreadPool& pool);

  ErrorMeasures measure(const float* decoded, ThreadPool& pool) const;

  // Improves tensor.suh and tensor.svh. Scales that are zero stay zero; a factor that is not finite or leaves [1/2, 2]
  // is not applied. damping: added to the Hessian's diagonal.
  void refit_scales(double damping, int n_rounds, Exl3Tensor& tensor, ThreadPool& pool) const;

 private:
  using Matrix = std::vector<double>;  // [k, n]

  Matrix times_hessian(const Matrix& a, double damping, ThreadPool& pool) const;
  // A G; `a` itself without an output metric.
  Matrix times_output(const Matrix& a, ThreadPool& pool) const;
  double inner(const Matrix& a, const Matrix& b, ThreadPool& pool) const;
  void refit_outputs(double damping, Matrix& decoded, Exl3Tensor& tensor, ThreadPool& pool) const;
  void refit_inputs(double damping, Matrix& decoded, Exl3Tensor& tensor, ThreadPool& pool) const;
  std::vector<double> coupled_output_factors(const Matrix& decoded, const Matrix& hq, const std::vector<double>& wanted,
                                             ThreadPool& pool) const;

  int64_t k_;
  int64_t n_;
  const double* hessian_;
  OutputMetric output_;
  SimdTier tier_;
  Matrix weight_;
  Matrix weight_out_;    // W G
  Matrix product_;       // H W G, undamped
  double power_ = 0;     // |W|^2
  double cost_ = 0;      // tr(W^T H W)
  double weighted_ = 0;  // tr(W^T H W G)
};

}  // namespace espalier::codec
