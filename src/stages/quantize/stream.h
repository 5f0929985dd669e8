// The calibration rows in flight: one sequence each, with everything that a forward pass carries from layer to layer.
//
// They are in memory, or in files of a work folder, one file per layer (stream_file.h): then one row at a time is in memory.
// Both give the same bits.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/progress.h"
#include "model/dataset.h"
#include "model/forward.h"
#include "stages/quantize/stream_file.h"

namespace espalier {

class WorkFolder;

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

  // The same into files of `work`, which must outlive the stream.
  static Result<CalibrationStream> begin_on_disk(const CallContext& context, const GlobalWeights& globals,
                                                 const std::vector<DatasetRow>& rows, const WorkFolder& work);
  // Goes on behind `layer`. Errors: data_loss when its file is not what sha256 says.
  static Result<CalibrationStream> open(const WorkFolder& work, int layer, const std::string& sha256, const Config& config);

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
  Result<Tensor> logits(const CallContext& context, const GlobalWeights& globals, size_t row) const;

  size_t size() const { return file_ ? file_->size() : rows_.size(); }
  // Shows row i for the time of the call.
  Status visit(size_t i, const std::function<Status(const CalibrationRow&)>& body) const;
  // On disk: digest of the rows behind the last layer that was advanced.
  const std::string& sha256() const { return sha256_; }

 private:
  // Row i to work on; what becomes of it is kept in memory and thrown away on disk.
  Status with_row(size_t i, const Config& config, const std::function<Status(CalibrationRow&)>& body);

  std::vector<CalibrationRow> rows_;
  const WorkFolder* work_ = nullptr;
  const Config* config_ = nullptr;
  std::shared_ptr<const StreamFile> file_;  // null: in memory
  std::string sha256_;
};

}  // namespace espalier
