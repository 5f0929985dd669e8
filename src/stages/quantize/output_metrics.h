// How much errors of an expert's outputs matter to the model: the output metrics of two-sided encoding.
//
// w2 writes into the residual streams; what later blocks read of a stream is known from their weights alone:
//   M_l = sum over blocks m > l of n(wq_a) + n(wkv) + n(gate) + n(w1) + n(w3)  +  8 n(head)
// with n(W) = A^T A brought to a mean diagonal of 1, A = W with the gain of the norm before it folded in. For the head,
// A^T (diag(p) - p p^T) A with p the frequencies of the calibration tokens: its Fisher matrix as if every token were
// predicted by frequency. An error of output j of w1 (w3) changes the expert's own output, to first order, by the
// derivative of z_j times row j of w2; its rms over the routed tokens is the diagonal metric of w1 (w3).
//
// Measured against gradients of the pocket model, and by KL: docs/decisions/codec-output-metrics.md.
#pragma once

#include <cstdint>
#include <vector>

#include "base/progress.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "model/dataset.h"
#include "model/forward.h"
#include "model/weights.h"
#include "stages/quantize/capture.h"

namespace espalier {

// Damping of both kinds of metric, in units of their mean diagonal.
inline constexpr double kOutputMetricDamping = 1.0;

// The metric of every backbone layer's w2; in memory, n_layers * D^2 doubles.
class ResidualMetrics {
 public:
  // How many routed experts of a layer stand for all of them, evenly spaced.
  static constexpr int64_t kReaders = 16;

  ResidualMetrics() = default;
  // Reads every block once, last to first. Bytes depend on weights and token counts only. rows: calibration rows, at
  // least one token in all. Errors: those of loading; cancelled.
  static Result<ResidualMetrics> make(const WeightLoader& loader, const std::vector<DatasetRow>& rows,
                                      Progress& progress, ThreadPool& pool);

  // [D, D], mean diagonal 1; null when there are none.
  const double* of_layer(int layer) const;

 private:
  std::vector<std::vector<double>> layers_;
};

// Diagonal metrics [d_ff] of one expert's w1 and w3; empty when no token of weight was routed to it.
struct GateUpMetrics {
  std::vector<double> w1;
  std::vector<double> w3;
};

// expert: native. tokens: rows of inputs.x routed to it; scale: their factors, as for the Hessian. Few tokens say
// little: kPriorTokens tokens of the mean are mixed in. Threads: over outputs; the sum over tokens is in order.
GateUpMetrics gate_up_metrics(const CallContext& context, const MoeInputs& inputs, const ExpertWeights& expert,
                              const std::vector<int32_t>& tokens, const float* scale);

}  // namespace espalier
