// One run of the quantizer over one checkpoint: streaming, encoding, writing shards. Internal to the stage; the callers' side is
// quantize.h and library.h.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "model/forward.h"
#include "stages/quantize/capture.h"
#include "stages/quantize/draft_stream.h"
#include "stages/quantize/output_metrics.h"
#include "stages/quantize/quantize.h"
#include "stages/quantize/shards.h"
#include "stages/quantize/stream.h"
#include "stages/quantize/width_library.h"

namespace espalier {

class QuantizeRun {
 public:
  // dir: where shards go; empty: none are written, and every width of `library_widths` (half bits) of the routed experts is
  // encoded into the library instead of the one that the options give.
  QuantizeRun(const WeightLoader& loader, const QuantizeOptions& options, std::filesystem::path dir,
              std::vector<int> library_widths, Progress& progress, ThreadPool& pool);

  Result<QuantizeReport> run(const std::vector<DatasetRow>& rows);

 private:
  using Known = std::map<std::string, WidthLibrary::Entry>;

  // Places in the order of the network: backbone layers, head, main_proj, stages.
  int place_of(int block) const { return block < config_.n_layers ? block : block + 2; }
  int head_place() const { return config_.n_layers; }
  int main_proj_place() const { return config_.n_layers + 1; }

  Status check() const;
  void count(const std::vector<DatasetRow>& rows);
  double units_per_token(int block) const;
  double head_units_per_token() const;
  int64_t total_units(const std::vector<DatasetRow>& rows) const;
  bool builds_library() const { return dir_.empty(); }
  bool is_streamed_native() const { return options_.stream == StreamFrom::kNative; }

  // The block's matrices without head and main_proj, at the widths of the options.
  BlockJob job_of(int block) const;
  // Everything that a block's turn encodes: the job itself, or one job per width of the library and one for the rest.
  std::vector<BlockJob> jobs_of(int block) const;
  const MatrixSpec* find_spec(MatrixKind kind) const;
  // The last place whose matrices are not all in the library; -1: the library holds everything.
  Result<int> last_missing() const;
  Result<Known> find_known(const BlockJob& job) const;

  // Encodes what the library lacks of the jobs and puts the rest into `weights`; afterwards they hold the first job's matrices.
  Status take_block(int block, const BlockCapture* capture, BlockWeights& weights);
  Status take_job(int block, BlockJob job, const BlockCapture* capture, BlockWeights& weights);
  Status run_block(CalibrationStream& stream, int layer);
  // Puts a block's matrices in place when the work folder has all of them; then its inputs are not needed.
  bool take_kept(const BlockJob& job, BlockWeights& weights);
  // The stream behind the last layer that the work folder has as done, and that layer's number (-1: none). Their records and
  // coverage are in the report then.
  Result<CalibrationStream> resume_stream(const GlobalWeights& globals, const std::vector<DatasetRow>& rows, int* done);
  // A matrix outside the blocks: from the library, or encoded from what `observe` lets a capture see.
  template <typename Observe>
  Status take_root(const MatrixSpec& spec, bool is_drafter, Linear* linear, const Observe& observe);
  Status run_head(CalibrationStream& stream, GlobalWeights& globals, const std::vector<DatasetRow>& rows);
  Status run_drafter(const CalibrationStream& stream, const GlobalWeights& globals);
  Status run_stage(DraftCalibration& drafts, int stage, EncodedTensors* encoded, BlockWeights* weights);
  Status write_native_shards();
  Status write(int block, const EncodedTensors& encoded);

  const WeightLoader& loader_;
  const Config& config_;
  const QuantizeOptions& options_;
  const std::filesystem::path dir_;
  const std::vector<int> library_widths_;
  Progress& progress_;
  ThreadPool& pool_;
  QuantizeReport report_;
  const std::vector<MatrixSpec> specs_;  // to be quantized
  const ShardPlan shards_;
  const CallContext context_;
  ResidualMetrics residual_;
  int last_missing_ = 0;
};

}  // namespace espalier
