// The drafter's calibration: real draft calls along the calibration rows, on the taps of the quantized backbone.
//
// At every `stride`-th position p of a row a draft is started with the token that really follows; its rows go through
// the stages one after another, out of the already-quantized ones, and each stage's ring is seeded with the main_x of
// the accepted positions up to p, as in serving. Source: model specification 8.1, quality specification 1.5 (last
// paragraph).
#pragma once

#include <vector>

#include "base/progress.h"
#include "model/drafter.h"
#include "stages/quantize/stream.h"

namespace espalier {

class DraftCalibration {
 public:
  // Positions of one row of n tokens at which drafts start: stride - 1, 2 stride - 1, …, at most n - 2; the last such
  // position when the row is shorter than that. Empty for rows of fewer than 3 tokens.
  static std::vector<int64_t> draft_positions(int64_t n, int64_t stride);

  // Computes main_x of every row from its taps (observer: sees main_proj's input when set) and starts all draft calls.
  // Errors: data_loss when a row cannot be read back.
  static Result<DraftCalibration> begin(const CallContext& context, const GlobalWeights& globals,
                                        const DrafterGlobals& drafter, const CalibrationStream& backbone, int64_t stride);
  // Lets `observer` see main_proj's input for all tokens.
  static Status observe_taps(const CallContext& context, const DrafterGlobals& drafter,
                             const CalibrationStream& backbone, LayerObserver* observer, Progress& progress,
                             double units = 0);

  // As CalibrationStream: run all draft calls through one stage and forget, or keep, the outcome.
  Status observe_stage(const CallContext& context, const BlockWeights& weights, int stage, LayerObserver* observer,
                       Progress& progress, double units = 0);
  Status advance_stage(const CallContext& context, const BlockWeights& weights, int stage, Progress& progress,
                       double units = 0, LayerObserver* observer = nullptr);

  int64_t n_calls() const;

 private:
  struct Row {
    int64_t n_tokens = 0;
    std::vector<float> main_x;       // [n_tokens, D]
    std::vector<int64_t> positions;  // p of each draft
    std::vector<DraftStream> drafts;
  };
  Status run_stage(const CallContext& context, const BlockWeights& weights, int stage, bool keep, Progress& progress,
                   double units);

  std::vector<Row> rows_;
};

}  // namespace espalier
