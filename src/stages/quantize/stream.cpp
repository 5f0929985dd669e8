#include "stages/quantize/stream.h"

#include <optional>
#include <utility>

#include "stages/quantize/work_folder.h"

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

Result<CalibrationStream> CalibrationStream::begin_on_disk(const CallContext& context, const GlobalWeights& globals,
                                                           const std::vector<DatasetRow>& rows, const WorkFolder& work) {
  ASSIGN_OR_RETURN(StreamWriter writer, StreamWriter::create(work.stream_of(-1)));
  for (const DatasetRow& row : rows) {
    CalibrationRow r{SequenceState(context.config), {}};
    Status status = begin_call(context, globals, r.state, row.ids, &r.stream);
    if (!status.ok()) return std::move(status).with_context("calibration row '" + row.id + "'");
    RETURN_IF_ERROR(writer.add(r));
  }
  ASSIGN_OR_RETURN(const std::string sha256, writer.commit(-1, work.recipe_id()));
  return open(work, -1, sha256, context.config);
}

Result<CalibrationStream> CalibrationStream::open(const WorkFolder& work, int layer, const std::string& sha256,
                                                  const Config& config) {
  CalibrationStream out;
  ASSIGN_OR_RETURN(StreamFile file, StreamFile::open(work.stream_of(layer), layer, work.recipe_id(), sha256));
  out.file_ = std::make_shared<const StreamFile>(std::move(file));
  out.work_ = &work;
  out.config_ = &config;
  out.sha256_ = sha256;
  return out;
}

Status CalibrationStream::with_row(size_t i, const Config& config, const std::function<Status(CalibrationRow&)>& body) {
  if (!file_) return body(rows_.at(i));
  ASSIGN_OR_RETURN(CalibrationRow row, file_->row(i, config));
  return body(row);
}

Status CalibrationStream::visit(size_t i, const std::function<Status(const CalibrationRow&)>& body) const {
  if (!file_) return body(rows_.at(i));
  ASSIGN_OR_RETURN(const CalibrationRow row, file_->row(i, *config_));
  return body(row);
}

Status CalibrationStream::observe_layer(const CallContext& context, const BlockWeights& weights, int layer,
                                        LayerObserver* observer, Progress& progress, double units) {
  CallContext observed = context;
  observed.observer = observer;
  for (size_t i = 0; i < size(); ++i) {
    if (progress.is_cancelled()) return cancelled("stopped in layer " + std::to_string(layer));
    RETURN_IF_ERROR(with_row(i, context.config, [&](CalibrationRow& row) {
      // The layer writes its own caches (window, compressed KV, index keys) into the state and everything else into the
      // stream: a copied stream is enough, because advance_layer writes the same cache places again before anyone reads
      // them.
      StreamState scratch = row.stream;
      progress.advance(pass_units(row.stream.n_rows(), units));
      return run_layer(observed, weights, layer, row.state, scratch);
    }));
  }
  return ok_status();
}

Status CalibrationStream::advance_layer(const CallContext& context, const BlockWeights& weights, int layer,
                                        Progress& progress, double units, LayerObserver* observer) {
  CallContext observed = context;
  observed.observer = observer;
  std::optional<StreamWriter> writer;
  if (file_) {
    ASSIGN_OR_RETURN(writer, StreamWriter::create(work_->stream_of(layer)));
  }
  for (size_t i = 0; i < size(); ++i) {
    if (progress.is_cancelled()) return cancelled("stopped in layer " + std::to_string(layer));
    RETURN_IF_ERROR(with_row(i, context.config, [&](CalibrationRow& row) {
      progress.advance(pass_units(row.stream.n_rows(), units));
      RETURN_IF_ERROR(run_layer(observed, weights, layer, row.state, row.stream));
      return writer ? writer->add(row) : ok_status();
    }));
  }
  if (!writer) return ok_status();
  ASSIGN_OR_RETURN(sha256_, writer->commit(layer, work_->recipe_id()));
  ASSIGN_OR_RETURN(StreamFile file, StreamFile::open(work_->stream_of(layer), layer, work_->recipe_id(), std::nullopt));
  file_ = std::make_shared<const StreamFile>(std::move(file));
  return ok_status();
}

Status CalibrationStream::observe_head(const CallContext& context, const GlobalWeights& globals,
                                       LayerObserver* observer, Progress& progress, double units) {
  CallContext observed = context;
  observed.observer = observer;
  for (size_t i = 0; i < size(); ++i) {
    if (progress.is_cancelled()) return cancelled("stopped before the head");
    RETURN_IF_ERROR(visit(i, [&](const CalibrationRow& row) {
      SequenceState scratch = row.state;
      finish_call(observed, globals, scratch, row.stream, true);
      progress.advance(pass_units(row.stream.n_rows(), units));
      return ok_status();
    }));
  }
  return ok_status();
}

Result<Tensor> CalibrationStream::logits(const CallContext& context, const GlobalWeights& globals, size_t row) const {
  CallContext silent = context;
  silent.observer = nullptr;
  Tensor out;
  RETURN_IF_ERROR(visit(row, [&](const CalibrationRow& r) {
    SequenceState scratch = r.state;
    out = finish_call(silent, globals, scratch, r.stream, true);
    return ok_status();
  }));
  return out;
}

}  // namespace espalier
