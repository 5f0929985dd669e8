// The calibration rows in flight: one sequence each, with everything that a forward pass carries from layer to layer.
#pragma once

#include <vector>

#include "base/progress.h"
#include "model/dataset.h"
#include "model/forward.h"

namespace espalier {

// What one pass over a row counts in progress units (encoded weights): the cost of a forward pass relative to encoding.
inline int64_t pass_units(int64_t n_tokens, double units_per_token) {
  return static_cast<int64_t>(static_cast<double>(n_tokens) * units_per_token);
}

struct CalibrationRow {
  SequenceState state;  // caches of source layers, windows, Engram history
  StreamState stream;   // residual streams, collapse weights, selections, candidates, taps
};

class CalibrationStream {
 public:
  // Embeds every row. Errors: those of begin_call, naming the row; cancelled.
  static Result<CalibrationStream> begin(const CallContext& context, const GlobalWeights& globals,
                                         const std::vector<DatasetRow>& rows);

  // Runs every row through `weights` and throws the outcome away; `observer` sees the inputs. The rows are unchanged.
  // units: progress units per token, see pass_units.
  Status observe_layer(const CallContext& context, const BlockWeights& weights, int layer, LayerObserver* observer,
                       Progress& progress, double units = 0);
  // Runs every row through `weights` and keeps the outcome; `observer`, when set, sees the inputs.
  Status advance_layer(const CallContext& context, const BlockWeights& weights, int layer, Progress& progress,
                       double units = 0, LayerObserver* observer = nullptr);
  // Lets `observer` see the head's input for every row.
  Status observe_head(const CallContext& context, const GlobalWeights& globals, LayerObserver* observer,
                      Progress& progress, double units = 0);
  // Logits [n, vocab] of one row.
  Tensor logits(const CallContext& context, const GlobalWeights& globals, size_t row) const;

  const std::vector<CalibrationRow>& rows() const { return rows_; }

 private:
  std::vector<CalibrationRow> rows_;
};

}  // namespace espalier
