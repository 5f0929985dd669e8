#include "stages/quantize/stream.h"

#include <utility>

namespace espalier {

Result<CalibrationStream> CalibrationStream::begin(const CallContext& context, const GlobalWeights& globals,
                                                   const std::vector<DatasetRow>& rows) {
  CalibrationStream out;
  for (const DatasetRow& row : rows) {
    CalibrationRow r{SequenceState(context.config), {}};
    Status status = begin_call(context, globals, r.state, row.ids, &r.stream);
    if (!status.ok()) return std::move(status).with_context("calibration row '" + row.id + "'");
    out.rows_.push_back(std::move(r));
  }
  return out;
}

Status CalibrationStream::observe_layer(const CallContext& context, const BlockWeights& weights, int layer,
                                        LayerObserver* observer, Progress& progress, double units) {
  CallContext observed = context;
  observed.observer = observer;
  for (CalibrationRow& row : rows_) {
    if (progress.is_cancelled()) return cancelled("stopped in layer " + std::to_string(layer));
    // The layer writes its own caches (window, compressed KV, index keys) into the state and everything else into the
    // stream: a copied stream is enough, because advance_layer writes the same cache places again before anyone reads
    // them.
    StreamState scratch = row.stream;
    RETURN_IF_ERROR(run_layer(observed, weights, layer, row.state, scratch));
    progress.advance(pass_units(row.stream.n_rows(), units));
  }
  return ok_status();
}

Status CalibrationStream::advance_layer(const CallContext& context, const BlockWeights& weights, int layer,
                                        Progress& progress, double units, LayerObserver* observer) {
  CallContext observed = context;
  observed.observer = observer;
  for (CalibrationRow& row : rows_) {
    if (progress.is_cancelled()) return cancelled("stopped in layer " + std::to_string(layer));
    RETURN_IF_ERROR(run_layer(observed, weights, layer, row.state, row.stream));
    progress.advance(pass_units(row.stream.n_rows(), units));
  }
  return ok_status();
}

Status CalibrationStream::observe_head(const CallContext& context, const GlobalWeights& globals,
                                       LayerObserver* observer, Progress& progress, double units) {
  CallContext observed = context;
  observed.observer = observer;
  for (const CalibrationRow& row : rows_) {
    if (progress.is_cancelled()) return cancelled("stopped before the head");
    SequenceState scratch = row.state;
    finish_call(observed, globals, scratch, row.stream, true);
    progress.advance(pass_units(row.stream.n_rows(), units));
  }
  return ok_status();
}

Tensor CalibrationStream::logits(const CallContext& context, const GlobalWeights& globals, size_t row) const {
  CallContext silent = context;
  silent.observer = nullptr;
  SequenceState scratch = rows_.at(row).state;
  return finish_call(silent, globals, scratch, rows_.at(row).stream, true);
}

}  // namespace espalier
