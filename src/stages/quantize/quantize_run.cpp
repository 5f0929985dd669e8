#include "stages/quantize/quantize_run.h"

#include <algorithm>

#include "base/check.h"
#include "base/log.h"
#include "model/drafter.h"
#include "stages/quantize/encoded_unit.h"
#include "stages/quantize/work_folder.h"

namespace espalier {
namespace {

constexpr double kWeightsPerUnit = 65536;

bool is_routed(const MatrixSpec& spec) {
  return spec.expert >= 0;
}

void add_encoded(BlockWeights& weights, const std::vector<MatrixSpec>& specs, EncodedTensors* out) {
  for (const MatrixSpec& spec : specs) {
    const Linear* linear = find_linear(weights, spec);
    if (spec.is_quantizable && linear != nullptr) out->emplace_back(spec.stem, *linear->exl3());
  }
}

}  // namespace

QuantizeRun::QuantizeRun(const WeightLoader& loader, const QuantizeOptions& options, std::filesystem::path dir,
                         std::vector<int> library_widths, Progress& progress, ThreadPool& pool)
    : loader_(loader),
      config_(loader.config()),
      options_(options),
      dir_(std::move(dir)),
      library_widths_(std::move(library_widths)),
      progress_(progress),
      pool_(pool),
      specs_(quantized_matrices(options_, config_, &report_.native)),
      shards_(loader.index(), config_, specs_),
      context_{config_, loader.engram_hashes(), loader.engram_token_map(), options.numerics, pool, nullptr} {}

Result<QuantizeReport> QuantizeRun::run(const std::vector<DatasetRow>& rows) {
  RETURN_IF_ERROR(check());
  count(rows);
  ASSIGN_OR_RETURN(GlobalWeights globals, loader_.load_globals(pool_));
  RETURN_IF_ERROR(write_native_shards());
  ASSIGN_OR_RETURN(last_missing_, last_missing());
  const bool needs_rows = last_missing_ >= 0;
  if (options_.encode.output_metrics && needs_rows) {
    ASSIGN_OR_RETURN(residual_, ResidualMetrics::make(loader_, rows, progress_, pool_));
  }
  progress_.begin("quantize", total_units(rows));
  CalibrationStream stream;
  int done = -1;
  if (options_.work != nullptr) {
    ASSIGN_OR_RETURN(stream, resume_stream(globals, rows, &done));
  } else {
    ASSIGN_OR_RETURN(stream, CalibrationStream::begin(context_, globals, needs_rows ? rows : std::vector<DatasetRow>()));
  }
  for (int layer = done + 1; layer < config_.n_layers; ++layer) {
    Status status = run_block(stream, layer);
    if (!status.ok()) return std::move(status).with_context("quantize: layer " + std::to_string(layer));
  }
  Status status = run_head(stream, globals, rows);
  if (!status.ok()) return std::move(status).with_context("quantize: head");
  if (config_.drafter.n_stages > 0) {
    status = run_drafter(stream, globals);
    if (!status.ok()) return std::move(status).with_context("quantize: drafter");
  }
  return std::move(report_);
}

Status QuantizeRun::check() const {
  RETURN_IF_ERROR(check_options(options_));
  for (const std::string& name : loader_.index().names()) {
    constexpr std::string_view kTail = ".trellis";
    if (name.size() > kTail.size() && name.compare(name.size() - kTail.size(), kTail.size(), kTail) == 0) {
      return failed_precondition("'" + loader_.dir() + "' holds EXL3 matrices already ('" + name +
                                 "'); quantize the official checkpoint it was made from");
    }
  }
  return check_widths(options_, config_);
}

void QuantizeRun::count(const std::vector<DatasetRow>& rows) {
  report_.rows = static_cast<int64_t>(rows.size());
  for (const DatasetRow& row : rows) {
    const auto n = static_cast<int64_t>(row.ids.size());
    report_.tokens += n;
    report_.longest_row = std::max(report_.longest_row, n);
    if (config_.drafter.n_stages > 0) {
      report_.draft_calls += static_cast<int64_t>(DraftCalibration::draft_positions(n, options_.draft_stride).size());
    }
  }
}

// Progress is counted in weights; running a token through a layer costs about as much as encoding 1 / kWeightsPerUnit
// of the weights that it meets. Shows how far the run is; nothing else depends on it.
double QuantizeRun::units_per_token(int block) const {
  const bool is_drafter = block >= config_.n_layers;
  const double active = static_cast<double>(is_drafter ? config_.drafter.n_active : config_.n_active);
  const double share = active / static_cast<double>(is_drafter ? config_.drafter.n_experts : config_.n_experts);
  double weights = 0;
  for (const MatrixSpec& spec : block_matrices(config_, block)) {
    weights += static_cast<double>(spec.in * spec.out) * (is_routed(spec) ? share : 1.0);
  }
  return weights / kWeightsPerUnit;
}

double QuantizeRun::head_units_per_token() const {
  return static_cast<double>(config_.vocab * config_.d_model) / kWeightsPerUnit;
}

int64_t QuantizeRun::total_units(const std::vector<DatasetRow>& rows) const {
  int64_t total = 0;
  for (const MatrixSpec& spec : specs_) {
    const bool in_backbone = is_routed(spec) && spec.block < config_.n_layers;
    total += spec.in * spec.out * (builds_library() && in_backbone ? static_cast<int64_t>(library_widths_.size()) : 1);
  }
  if (last_missing_ < 0) return total;
  for (const DatasetRow& row : rows) {
    const auto n = static_cast<int64_t>(row.ids.size());
    for (int layer = 0; layer < config_.n_layers; ++layer) total += 2 * pass_units(n, units_per_token(layer));
    if (find_spec(MatrixKind::kHead) != nullptr) total += pass_units(n, head_units_per_token());
    const auto drafted = static_cast<int64_t>(DraftCalibration::draft_positions(n, options_.draft_stride).size()) *
                         config_.drafter.block_size;
    for (int stage = 0; stage < config_.drafter.n_stages; ++stage) {
      const int passes = stage + 1 < config_.drafter.n_stages ? 2 : 1;  // nobody reads the last stage's outcome
      total += passes * pass_units(drafted, units_per_token(config_.n_layers + stage));
    }
  }
  return total;
}

Status QuantizeRun::write_native_shards() {
  for (const ShardPlan::Shard& shard : shards_.shards()) {
    if (progress_.is_cancelled()) return cancelled("stopped while copying native tensors");
    std::error_code ec;
    if (options_.work != nullptr && std::filesystem::is_regular_file(dir_ / shard.name, ec)) continue;
    if (shard.block == -1 && !builds_library()) RETURN_IF_ERROR(write_shard(dir_, shard, loader_.index(), {}));
  }
  return ok_status();
}

Status QuantizeRun::write(int block, const EncodedTensors& encoded) {
  if (builds_library()) return ok_status();
  return write_shard(dir_, shards_.of_block(block), loader_.index(), encoded);
}

BlockJob QuantizeRun::job_of(int block) const {
  const bool is_drafter = block >= config_.n_layers;
  BlockJob job{context_,
               options_.encode,
               block_matrices(config_, block),
               {},
               block_prefix(config_, block),
               is_drafter ? config_.drafter.n_experts : config_.n_experts,
               residual_.of_layer(block),
               options_.work};
  std::erase_if(job.specs,
                [](const MatrixSpec& s) { return s.kind == MatrixKind::kMainProj || s.kind == MatrixKind::kHead; });
  for (MatrixSpec& spec : job.specs) {
    job.k2.push_back(width_of(options_, spec, config_.n_layers));
    spec.is_quantizable = spec.is_quantizable && job.k2.back() != kNativeWidth;
  }
  return job;
}

std::vector<BlockJob> QuantizeRun::jobs_of(int block) const {
  std::vector<BlockJob> jobs = {job_of(block)};
  if (!builds_library() || block >= config_.n_layers) return jobs;
  const BlockJob whole = jobs[0];
  for (MatrixSpec& spec : jobs[0].specs) spec.is_quantizable = spec.is_quantizable && !is_routed(spec);
  for (const int k2 : library_widths_) {
    BlockJob job = whole;
    for (size_t i = 0; i < job.specs.size(); ++i) {
      job.specs[i].is_quantizable = job.specs[i].is_quantizable && is_routed(job.specs[i]);
      job.k2[i] = k2;
    }
    jobs.push_back(std::move(job));
  }
  return jobs;
}

const MatrixSpec* QuantizeRun::find_spec(MatrixKind kind) const {
  const auto it = std::find_if(specs_.begin(), specs_.end(), [&](const MatrixSpec& s) { return s.kind == kind; });
  return it == specs_.end() ? nullptr : &*it;
}

Result<int> QuantizeRun::last_missing() const {
  const int n_blocks = config_.n_layers + config_.drafter.n_stages;
  if (options_.library == nullptr) return std::max(place_of(n_blocks - 1), head_place());
  int last = -1;
  for (int block = 0; block < n_blocks; ++block) {
    for (const BlockJob& job : jobs_of(block)) {
      std::vector<MatrixSpec> specs;
      std::vector<int> k2;
      for (size_t i = 0; i < job.specs.size(); ++i) {
        if (!job.specs[i].is_quantizable) continue;
        specs.push_back(job.specs[i]);
        k2.push_back(job.k2[i]);
      }
      ASSIGN_OR_RETURN(const bool has_all, options_.library->has_all(specs, k2));
      ASSIGN_OR_RETURN(const auto coverage, options_.library->coverage(block));
      if (!has_all || !coverage) last = place_of(block);
    }
  }
  for (const auto& [kind, place] : {std::pair{MatrixKind::kHead, head_place()}, {MatrixKind::kMainProj, main_proj_place()}}) {
    const MatrixSpec* spec = find_spec(kind);
    if (spec == nullptr) continue;
    ASSIGN_OR_RETURN(const bool has, options_.library->has_all({*spec}, {width_of(options_, *spec, config_.n_layers)}));
    if (!has) last = std::max(last, place);
  }
  return last;
}

Result<QuantizeRun::Known> QuantizeRun::find_known(const BlockJob& job) const {
  if (options_.library == nullptr) return Known();
  std::vector<MatrixSpec> specs;
  std::vector<int> k2;
  for (size_t i = 0; i < job.specs.size(); ++i) {
    if (!job.specs[i].is_quantizable) continue;
    specs.push_back(job.specs[i]);
    k2.push_back(job.k2[i]);
  }
  ASSIGN_OR_RETURN(Known known, options_.library->find(specs, k2));
  // An expert's matrices are encoded together: one that is not there as a whole counts as missing.
  std::map<int, int> missing;
  for (const MatrixSpec& spec : specs) {
    if (is_routed(spec) && known.count(spec.stem) == 0) ++missing[spec.expert];
  }
  for (const MatrixSpec& spec : specs) {
    if (is_routed(spec) && missing.count(spec.expert) != 0) known.erase(spec.stem);
  }
  return known;
}

Status QuantizeRun::take_job(int block, BlockJob job, const BlockCapture* capture, BlockWeights& weights) {
  ASSIGN_OR_RETURN(Known known, find_known(job));
  const BlockJob whole = job;
  bool is_missing = false;
  for (MatrixSpec& spec : job.specs) {
    if (known.count(spec.stem) != 0) spec.is_quantizable = false;
    is_missing = is_missing || spec.is_quantizable;
  }
  std::vector<MatrixRecord> made;
  BlockCoverage coverage;
  CHECK(capture != nullptr || !is_missing) << "a block with something missing was not captured";
  if (capture != nullptr) {
    RETURN_IF_ERROR(encode_block(job, *capture, weights, &made, &coverage, progress_));
    if (options_.library != nullptr) RETURN_IF_ERROR(options_.library->add_coverage(block, coverage));
  } else {
    ASSIGN_OR_RETURN(const std::optional<BlockCoverage> stored, options_.library->coverage(block));
    CHECK(stored.has_value()) << "last_missing looked for it";
    coverage = *stored;
  }
  if (options_.library != nullptr && !made.empty()) {
    std::map<int, std::vector<WidthLibrary::Entry>> by_width;
    for (const MatrixRecord& record : made) {
      const auto spec = std::find_if(job.specs.begin(), job.specs.end(), [&](const MatrixSpec& s) { return s.stem == record.stem; });
      by_width[record.k2].push_back({record, copy_exl3(*find_linear(weights, *spec)->exl3())});
    }
    for (const auto& [k2, entries] : by_width) RETURN_IF_ERROR(options_.library->add(block, k2, entries));
  }
  // Records in the order of the network, whoever they came from.
  size_t next = 0;
  for (const MatrixSpec& spec : whole.specs) {
    const auto it = known.find(spec.stem);
    if (it != known.end()) {
      progress_.advance(spec.in * spec.out, spec.stem);
      report_.matrices.push_back(std::move(it->second.record));
      *find_linear(weights, spec) = Linear::from_exl3(std::move(it->second.tensor), WeightResidency::kUnpacked);
    } else if (next < made.size() && made[next].stem == spec.stem) {
      report_.matrices.push_back(std::move(made[next++]));
    }
  }
  if (report_.coverage.empty() || report_.coverage.back().prefix != coverage.prefix) report_.coverage.push_back(std::move(coverage));
  return ok_status();
}

Status QuantizeRun::take_block(int block, const BlockCapture* capture, BlockWeights& weights) {
  const std::vector<BlockJob> jobs = jobs_of(block);
  RETURN_IF_ERROR(take_job(block, jobs[0], capture, weights));
  for (size_t i = 1; i < jobs.size(); ++i) {  // each from native weights
    ASSIGN_OR_RETURN(BlockWeights fresh, loader_.load_block(pool_, block));
    RETURN_IF_ERROR(take_job(block, jobs[i], capture, fresh));
  }
  return ok_status();
}

Result<CalibrationStream> QuantizeRun::resume_stream(const GlobalWeights& globals, const std::vector<DatasetRow>& rows, int* done) {
  const WorkFolder& work = *options_.work;
  std::vector<WorkFolder::DoneLayer> layers;
  for (int layer = 0; layer < config_.n_layers; ++layer) {
    std::error_code ec;
    std::optional<WorkFolder::DoneLayer> found = work.find_layer(layer);
    if (!found || !std::filesystem::is_regular_file(dir_ / shards_.of_block(layer).name, ec)) break;
    layers.push_back(std::move(*found));
  }
  *done = -1;
  if (layers.empty()) return CalibrationStream::begin_on_disk(context_, globals, rows, work);
  const int last = static_cast<int>(layers.size()) - 1;
  auto stream = CalibrationStream::open(work, last, layers.back().stream_sha256, config_);
  if (!stream.ok()) {
    log(LogLevel::kWarning, stream.error().message() + "; the run begins again at the first layer");
    return CalibrationStream::begin_on_disk(context_, globals, rows, work);
  }
  for (WorkFolder::DoneLayer& layer : layers) {
    for (MatrixRecord& record : layer.records) {
      progress_.advance(record.in * record.out, record.stem);
      report_.matrices.push_back(std::move(record));
    }
    report_.coverage.push_back(std::move(layer.coverage));
  }
  log(LogLevel::kInfo, "resumed behind layer " + std::to_string(last));
  *done = last;
  return stream;
}

Status QuantizeRun::run_block(CalibrationStream& stream, int layer) {
  ASSIGN_OR_RETURN(BlockWeights weights, loader_.load_block(pool_, layer));
  const BlockJob job = job_of(layer);
  const bool goes_on = last_missing_ > place_of(layer);
  const size_t first_record = report_.matrices.size();
  const bool is_kept = take_kept(job, weights);
  std::optional<BlockCapture> capture;
  if (is_kept && is_streamed_native()) {
    ASSIGN_OR_RETURN(const BlockWeights native, loader_.load_block(pool_, layer));
    RETURN_IF_ERROR(stream.advance_layer(context_, native, layer, progress_, units_per_token(layer)));
  }
  if (!is_kept && last_missing_ >= place_of(layer)) {
    capture.emplace(job.specs, false, pool_);
    RETURN_IF_ERROR(stream.observe_layer(context_, weights, layer, &*capture, progress_, units_per_token(layer)));
    capture->finish();
    if (is_streamed_native() && goes_on) {
      RETURN_IF_ERROR(stream.advance_layer(context_, weights, layer, progress_, units_per_token(layer)));
    }
  }
  if (!is_kept) RETURN_IF_ERROR(take_block(layer, capture ? &*capture : nullptr, weights));
  capture.reset();
  EncodedTensors encoded;
  if (!builds_library()) add_encoded(weights, job.specs, &encoded);
  RETURN_IF_ERROR(write(layer, encoded));
  if (!is_streamed_native() && goes_on) {
    RETURN_IF_ERROR(stream.advance_layer(context_, weights, layer, progress_, units_per_token(layer)));
  }
  if (options_.work == nullptr) return ok_status();
  const std::vector<MatrixRecord> records(report_.matrices.begin() + static_cast<int64_t>(first_record), report_.matrices.end());
  return options_.work->keep_layer(layer, job.prefix, {records, report_.coverage.back(), stream.sha256()});
}

bool QuantizeRun::take_kept(const BlockJob& job, BlockWeights& weights) {
  BlockCoverage coverage;
  if (!take_kept_block(job, weights, &report_.matrices, &coverage, progress_)) return false;
  report_.coverage.push_back(std::move(coverage));
  return true;
}

template <typename Observe>
Status QuantizeRun::take_root(const MatrixSpec& spec, bool is_drafter, Linear* linear, const Observe& observe) {
  const int k2 = width_of(options_, spec, config_.n_layers);
  Known known;
  if (options_.library != nullptr) {
    ASSIGN_OR_RETURN(known, options_.library->find({spec}, {k2}));
  }
  if (!known.empty()) {
    report_.matrices.push_back(std::move(known.begin()->second.record));
    *linear = Linear::from_exl3(std::move(known.begin()->second.tensor), WeightResidency::kUnpacked);
    progress_.advance(spec.in * spec.out, spec.stem);
    return ok_status();
  }
  const UnitShape shape{spec.stem, {spec}, {k2}, options_.encode.codec.codebook};
  if (options_.work != nullptr) {
    if (std::optional<EncodedUnit> unit = options_.work->find_unit(shape)) {
      report_.matrices.push_back(std::move(unit->records[0]));
      *linear = Linear::from_exl3(std::move(unit->tensors[0]), WeightResidency::kUnpacked);
      progress_.advance(spec.in * spec.out, spec.stem);
      return ok_status();
    }
  }
  BlockCapture capture({spec}, is_drafter, pool_);
  RETURN_IF_ERROR(observe(&capture));
  capture.finish();
  const Hessian* hessian = capture.hessian_of(spec);
  MatrixRecord record;
  if (hessian != nullptr) describe_hessian(*hessian, &record);
  RETURN_IF_ERROR(encode_matrix(options_.encode, {spec, k2, linear, &record},
                                hessian == nullptr ? nullptr : hessian->sum.data(), {}, pool_));
  if (options_.library != nullptr) {
    RETURN_IF_ERROR(options_.library->add(spec.block, k2, {{record, copy_exl3(*linear->exl3())}}));
  }
  if (options_.work != nullptr) {
    RETURN_IF_ERROR(options_.work->keep_unit({{record}, {copy_exl3(*linear->exl3())}}, shape.name));
  }
  report_.matrices.push_back(std::move(record));
  progress_.advance(spec.in * spec.out, spec.stem);
  return ok_status();
}

Status QuantizeRun::run_head(CalibrationStream& stream, GlobalWeights& globals, const std::vector<DatasetRow>& rows) {
  EncodedTensors encoded;
  Linear made;
  if (const MatrixSpec* spec = find_spec(MatrixKind::kHead)) {
    ASSIGN_OR_RETURN(made, loader_.load_matrix(*spec));
    RETURN_IF_ERROR(take_root(*spec, false, &made, [&](BlockCapture* capture) {
      return stream.observe_head(context_, globals, capture, progress_, head_units_per_token());
    }));
    encoded.emplace_back(spec->stem, *made.exl3());
  }
  RETURN_IF_ERROR(write(ShardPlan::kHead, encoded));
  if (is_streamed_native()) return ok_status();
  if (!made.empty()) globals.head = std::move(made);
  const auto shortest = std::min_element(
      rows.begin(), rows.end(), [](const DatasetRow& a, const DatasetRow& b) { return a.ids.size() < b.ids.size(); });
  report_.probe_ids = shortest->ids;
  ASSIGN_OR_RETURN(report_.probe_logits, stream.logits(context_, globals, static_cast<size_t>(shortest - rows.begin())));
  return ok_status();
}

Status QuantizeRun::run_stage(DraftCalibration& drafts, int stage, EncodedTensors* encoded, BlockWeights* weights) {
  const int block = config_.n_layers + stage;
  ASSIGN_OR_RETURN(*weights, loader_.load_block(pool_, block));
  const BlockJob job = job_of(block);
  const bool goes_on = last_missing_ > place_of(block);
  const bool is_kept = take_kept(job, *weights);
  std::optional<BlockCapture> capture;
  if (is_kept && is_streamed_native() && goes_on) {
    ASSIGN_OR_RETURN(const BlockWeights native, loader_.load_block(pool_, block));
    RETURN_IF_ERROR(drafts.advance_stage(context_, native, stage, progress_, units_per_token(block)));
  }
  if (!is_kept && last_missing_ >= place_of(block)) {
    capture.emplace(job.specs, true, pool_);
    RETURN_IF_ERROR(drafts.observe_stage(context_, *weights, stage, &*capture, progress_, units_per_token(block)));
    capture->finish();
    if (is_streamed_native() && goes_on) {
      RETURN_IF_ERROR(drafts.advance_stage(context_, *weights, stage, progress_, units_per_token(block)));
    }
  }
  if (!is_kept) RETURN_IF_ERROR(take_block(block, capture ? &*capture : nullptr, *weights));
  add_encoded(*weights, job.specs, encoded);
  if (is_streamed_native() || !goes_on) return ok_status();
  return drafts.advance_stage(context_, *weights, stage, progress_, units_per_token(block));
}

Status QuantizeRun::run_drafter(const CalibrationStream& stream, const GlobalWeights& globals) {
  ASSIGN_OR_RETURN(DrafterGlobals drafter, loader_.load_drafter_globals(pool_));
  const MatrixSpec* main_proj = find_spec(MatrixKind::kMainProj);
  Linear made;
  if (main_proj != nullptr) {
    ASSIGN_OR_RETURN(made, loader_.load_matrix(*main_proj));
    RETURN_IF_ERROR(take_root(*main_proj, true, &made, [&](BlockCapture* capture) {
      return DraftCalibration::observe_taps(context_, drafter, stream, capture, progress_);
    }));
    if (!is_streamed_native()) std::swap(drafter.main_proj, made);
  }
  const Linear& encoded_main_proj = is_streamed_native() ? made : drafter.main_proj;
  DraftCalibration drafts;
  if (last_missing_ > main_proj_place()) {
    ASSIGN_OR_RETURN(drafts, DraftCalibration::begin(context_, globals, drafter, stream, options_.draft_stride));
  }
  for (int stage = 0; stage < config_.drafter.n_stages; ++stage) {
    EncodedTensors encoded;
    BlockWeights weights;
    RETURN_IF_ERROR(run_stage(drafts, stage, &encoded, &weights));
    if (stage == 0 && main_proj != nullptr) encoded.emplace_back(main_proj->stem, *encoded_main_proj.exl3());
    RETURN_IF_ERROR(write(config_.n_layers + stage, encoded));
  }
  return ok_status();
}

Result<QuantizeReport> quantize(const WeightLoader& loader, const std::vector<DatasetRow>& rows,
                                const QuantizeOptions& options, const std::filesystem::path& shard_dir,
                                Progress& progress, ThreadPool& pool) {
  return QuantizeRun(loader, options, shard_dir, {}, progress, pool).run(rows);
}

Result<QuantizeReport> build_library(const WeightLoader& loader, const std::vector<DatasetRow>& rows,
                                     const QuantizeOptions& options, const std::vector<int>& widths, Progress& progress,
                                     ThreadPool& pool) {
  CHECK(options.library != nullptr);
  return QuantizeRun(loader, options, {}, widths, progress, pool).run(rows);
}

}  // namespace espalier
