// The routed expert matrices of a model and what each of them sees: weights decoded from their native form, and
// Hessians captured while the native network runs over calibration rows. Both sides of the comparison get exactly
// these.
//
// Routed Hessian: tokens routed to the expert, weighted by the square of the routing weight, blended with the layer's
// prior as `espalier quantize` does by default, w2's inputs from the native w1 and w3. All-token Hessian: every token,
// unweighted, every expert (what exllamav3 captures). Source: docs/decisions/exl3-primary-comparison.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "base/progress.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "model/dataset.h"
#include "model/names.h"
#include "model/weights.h"
#include "stages/quantize/output_metrics.h"

namespace espalier::quality {

struct ExpertMatrix {
  MatrixSpec spec;
  std::vector<float> weight;           // [in, out]
  std::vector<double> routed;          // [in, in]
  double effective_tokens = 0;         // effective sample size of what the routed one was made of, without the prior
  std::vector<double> output_weights;  // [out], w1 and w3: what an error of each output does to the expert's; w2: empty
  const double* residual = nullptr;    // [out, out], w2: what later blocks read of the residual streams; else null
  const double* all_tokens = nullptr;  // [in, in], or null when not captured; w1 and w3 of a layer share one
};

struct ExpertSet {
  std::vector<ExpertMatrix> matrices;  // by layer, then expert, then w1, w3, w2
  int n_layers = 0;
  std::string identity;                      // of model, calibration rows and rules: what results depend on
  std::vector<std::vector<double>> storage;  // behind all_tokens
  ResidualMetrics residual;                  // behind ExpertMatrix::residual
};

struct CaptureOptions {
  int n_layers = 0;         // first so many layers; 0: all
  bool all_tokens = false;  // capture the all-token Hessians too
};

// Loads the weights, and the Hessians from `cache` when they are there for the same inputs, else runs the network and
// writes them. Errors: those of loading, running and writing.
Result<ExpertSet> load_experts(const WeightLoader& loader, const std::vector<DatasetRow>& calibration,
                               const CaptureOptions& options, const std::filesystem::path& cache, Progress& progress,
                               ThreadPool& pool);

}  // namespace espalier::quality
