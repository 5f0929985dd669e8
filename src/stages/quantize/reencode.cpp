#include "stages/quantize/reencode.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "codec/exl3_tensor.h"
#include "model/coverage.h"
#include "stages/quantize/draft_stream.h"
#include "stages/quantize/output_metrics.h"
#include "stages/quantize/stream.h"

namespace espalier {
namespace {

class Run {
 public:
  Run(const WeightLoader& native, const WeightLoader& pack, const QuantizeOptions& options,
      const std::vector<std::string>& stems, Progress& progress, ThreadPool& pool)
      : native_(native),
        pack_(pack),
        config_(native.config()),
        options_(options),
        chosen_(stems.begin(), stems.end()),
        progress_(progress),
        pool_(pool),
        context_{config_, native.engram_hashes(), native.engram_token_map(), options.numerics, pool, nullptr} {
    for (const MatrixSpec& spec : all_matrices(config_)) {
      if (chosen_.count(spec.stem) != 0) last_ = std::max(last_, order_of(spec));
    }
  }

  Result<std::vector<Reencoded>> run(const std::vector<DatasetRow>& rows) {
    progress_.begin("rederive", std::min(last_ + 1, config_.n_layers) + 1);
    ASSIGN_OR_RETURN(const GlobalWeights globals, native_.load_globals(pool_));
    ASSIGN_OR_RETURN(CalibrationStream stream, CalibrationStream::begin(context_, globals, rows));
    SilentCancel quiet(progress_);
    if (options_.encode.output_metrics) {
      ASSIGN_OR_RETURN(residual_, ResidualMetrics::make(native_, rows, quiet, pool_));
    }
    for (int layer = 0; layer < config_.n_layers && layer <= last_; ++layer) {
      RETURN_IF_ERROR(run_layer(stream, layer, quiet));
      progress_.advance(1, block_prefix(config_, layer));
    }
    if (last_ >= config_.n_layers) RETURN_IF_ERROR(run_head(stream, globals, quiet));
    if (last_ > config_.n_layers) RETURN_IF_ERROR(run_drafter(stream, quiet));
    progress_.advance(1);
    return std::move(results_);
  }

 private:
  // Lets inner steps be stopped without counting their units.
  class SilentCancel : public SilentProgress {
   public:
    explicit SilentCancel(const Progress& outer) : outer_(outer) {}
    bool is_cancelled() const override { return outer_.is_cancelled(); }

   private:
    const Progress& outer_;
  };

  // Whose layers the rows ran through.
  const WeightLoader& streamed() const { return options_.stream == StreamFrom::kNative ? native_ : pack_; }

  // Backbone layers, head, main_proj, stages.
  int order_of(const MatrixSpec& spec) const {
    if (spec.kind == MatrixKind::kHead) return config_.n_layers;
    if (spec.kind == MatrixKind::kMainProj) return config_.n_layers + 1;
    return spec.block < config_.n_layers ? spec.block : spec.block + 2;
  }

  // The chosen matrices of a block, and whole experts for chosen parts of them; widths as stored.
  BlockJob job_of(int block) const {
    const bool is_drafter = block >= config_.n_layers;
    BlockJob job{context_,
                 options_.encode,
                 {},
                 {},
                 block_prefix(config_, block),
                 is_drafter ? config_.drafter.n_experts : config_.n_experts,
                 residual_.of_layer(block)};
    std::set<int> experts;
    const std::vector<MatrixSpec> specs = block_matrices(config_, block);
    for (const MatrixSpec& spec : specs) {
      if (spec.expert >= 0 && chosen_.count(spec.stem) != 0) experts.insert(spec.expert);
    }
    for (const MatrixSpec& spec : specs) {
      if (spec.kind == MatrixKind::kMainProj || !is_stored(spec)) continue;
      if (spec.expert >= 0 ? experts.count(spec.expert) == 0 : chosen_.count(spec.stem) == 0) continue;
      job.specs.push_back(spec);
      job.k2.push_back(stored_width(spec));
    }
    return job;
  }

  std::string stem_in_pack(const MatrixSpec& spec) const { return exl3_stem(pack_.index(), spec); }
  bool is_stored(const MatrixSpec& spec) const { return !stem_in_pack(spec).empty(); }
  int stored_width(const MatrixSpec& spec) const {
    return static_cast<int>(pack_.index().find(stem_in_pack(spec) + ".trellis")->shape[2] / 8);
  }

  static bool same_bytes(const void* made, const std::optional<ConstView>& stored) {
    return stored && std::memcmp(made, stored->data, static_cast<size_t>(stored->size_bytes())) == 0;
  }

  void compare(const MatrixSpec& spec, const Linear& made) {
    if (chosen_.count(spec.stem) == 0) return;
    const codec::Exl3View view = *made.exl3();
    const TensorIndex& index = pack_.index();
    const std::string stem = stem_in_pack(spec);
    std::string difference;
    for (const auto& [part, data] : {std::pair<const char*, const void*>{".trellis", view.trellis.words},
                                     {".suh", view.suh}, {".svh", view.svh}}) {
      if (!same_bytes(data, index.find(stem + part))) difference += (difference.empty() ? "" : ", ") + stem + part;
    }
    results_.push_back({spec.stem, difference});
  }

  Status encode_chosen(const BlockJob& job, const BlockCapture& capture, BlockWeights& weights, const Progress& outer) {
    std::vector<MatrixRecord> records;
    BlockCoverage coverage;
    SilentCancel quiet(outer);
    RETURN_IF_ERROR(encode_block(job, capture, weights, &records, &coverage, quiet));
    for (const MatrixSpec& spec : job.specs) compare(spec, *find_linear(weights, spec));
    return ok_status();
  }

  Status run_layer(CalibrationStream& stream, int layer, Progress& quiet) {
    const BlockJob job = job_of(layer);
    if (!job.specs.empty()) {
      ASSIGN_OR_RETURN(BlockWeights weights, native_.load_block(pool_, layer));
      BlockCapture capture(block_matrices(config_, layer), false, pool_);
      RETURN_IF_ERROR(stream.observe_layer(context_, weights, layer, &capture, quiet));
      capture.finish();
      RETURN_IF_ERROR(encode_chosen(job, capture, weights, progress_));
    }
    if (layer == last_) return ok_status();
    ASSIGN_OR_RETURN(const BlockWeights weights, streamed().load_block(pool_, layer));
    return stream.advance_layer(context_, weights, layer, quiet);
  }

  Status encode_root(const MatrixSpec& spec, BlockCapture& capture, Linear* linear) {
    capture.finish();
    const Hessian* hessian = capture.hessian_of(spec);
    MatrixRecord record;
    if (hessian != nullptr) describe_hessian(*hessian, &record);
    RETURN_IF_ERROR(encode_matrix(options_.encode, {spec, stored_width(spec), linear, &record},
                                  hessian == nullptr ? nullptr : hessian->sum.data(), {}, pool_));
    compare(spec, *linear);
    return ok_status();
  }

  const MatrixSpec* chosen_root(const std::vector<MatrixSpec>& specs, MatrixKind kind) const {
    const auto it = std::find_if(specs.begin(), specs.end(), [&](const MatrixSpec& s) {
      return s.kind == kind && chosen_.count(s.stem) != 0 && is_stored(s);
    });
    return it == specs.end() ? nullptr : &*it;
  }

  Status run_head(CalibrationStream& stream, const GlobalWeights& globals, Progress& quiet) {
    const std::vector<MatrixSpec> specs = all_matrices(config_);
    const MatrixSpec* head = chosen_root(specs, MatrixKind::kHead);
    if (head == nullptr) return ok_status();
    BlockCapture capture({*head}, false, pool_);
    RETURN_IF_ERROR(stream.observe_head(context_, globals, &capture, quiet));
    ASSIGN_OR_RETURN(Linear linear, native_.load_matrix(*head));
    return encode_root(*head, capture, &linear);
  }

  Status run_drafter(const CalibrationStream& stream, Progress& quiet) {
    const std::vector<MatrixSpec> specs = all_matrices(config_);
    if (const MatrixSpec* main_proj = chosen_root(specs, MatrixKind::kMainProj)) {
      ASSIGN_OR_RETURN(DrafterGlobals drafter, native_.load_drafter_globals(pool_));
      BlockCapture capture({*main_proj}, true, pool_);
      RETURN_IF_ERROR(DraftCalibration::observe_taps(context_, drafter, stream, &capture, quiet));
      RETURN_IF_ERROR(encode_root(*main_proj, capture, &drafter.main_proj));
    }
    ASSIGN_OR_RETURN(const GlobalWeights globals, streamed().load_globals(pool_));
    ASSIGN_OR_RETURN(const DrafterGlobals drafter, streamed().load_drafter_globals(pool_));
    ASSIGN_OR_RETURN(DraftCalibration drafts,
                     DraftCalibration::begin(context_, globals, drafter, stream, options_.draft_stride));
    for (int stage = 0; stage < config_.drafter.n_stages && config_.n_layers + stage + 2 <= last_; ++stage) {
      const int block = config_.n_layers + stage;
      const BlockJob job = job_of(block);
      if (!job.specs.empty()) {
        ASSIGN_OR_RETURN(BlockWeights weights, native_.load_block(pool_, block));
        std::vector<MatrixSpec> seen = block_matrices(config_, block);
        std::erase_if(seen, [](const MatrixSpec& s) { return s.kind == MatrixKind::kMainProj; });
        BlockCapture capture(seen, true, pool_);
        RETURN_IF_ERROR(drafts.observe_stage(context_, weights, stage, &capture, quiet));
        capture.finish();
        RETURN_IF_ERROR(encode_chosen(job, capture, weights, progress_));
      }
      if (block + 2 == last_) break;
      ASSIGN_OR_RETURN(const BlockWeights weights, streamed().load_block(pool_, block));
      RETURN_IF_ERROR(drafts.advance_stage(context_, weights, stage, quiet));
    }
    return ok_status();
  }

  const WeightLoader& native_;
  const WeightLoader& pack_;
  const Config& config_;
  const QuantizeOptions& options_;
  const std::set<std::string> chosen_;
  Progress& progress_;
  ThreadPool& pool_;
  const CallContext context_;
  ResidualMetrics residual_;
  int last_ = -1;  // order_of the last chosen matrix
  std::vector<Reencoded> results_;
};

}  // namespace

Result<std::vector<Reencoded>> reencode(const WeightLoader& native, const WeightLoader& pack,
                                        const std::vector<DatasetRow>& rows, const QuantizeOptions& options,
                                        const std::vector<std::string>& stems, Progress& progress, ThreadPool& pool) {
  return Run(native, pack, options, stems, progress, pool).run(rows);
}

}  // namespace espalier
