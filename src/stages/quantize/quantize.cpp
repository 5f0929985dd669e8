#include "stages/quantize/output_metrics.h"
#include "stages/quantize/quantize.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <set>

#include "codec/viterbi.h"
#include "model/drafter.h"
#include "stages/quantize/draft_stream.h"
#include "stages/quantize/shards.h"
#include "stages/quantize/stream.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

constexpr double kWeightsPerUnit = 65536;

bool is_routed(const MatrixSpec& spec) {
  return spec.expert >= 0;
}

bool is_kept(const QuantizeOptions& options, const MatrixSpec& spec) {
  const auto& kept = options.keep_native;
  return !kept.empty() && std::find(kept.begin(), kept.end(), projection_name(spec)) != kept.end();
}

Status check_width(const char* option, double bits, codec::Codebook codebook) {
  const Result<int> k2 = codec::width_from_bits(bits);
  char found[32];
  std::snprintf(found, sizeof found, "%g", bits);
  if (!k2.ok()) {
    return invalid_argument(std::string(option) + ": expected 1 to 8 bits, or 1.5, 2.5, 3.5, found " + found);
  }
  if (codec::is_searchable_width(*k2, codebook)) return ok_status();
  return invalid_argument(std::string(option) + ": " + found + " bits need the codebook mul1, found " +
                          std::string(codec::codebook_name(codebook)) + "; use --codebook mul1 or a whole number");
}

// One run over one checkpoint.
class Run {
 public:
  Run(const WeightLoader& loader, const QuantizeOptions& options, fs::path dir, Progress& progress, ThreadPool& pool)
      : loader_(loader),
        config_(loader.config()),
        options_(options),
        dir_(std::move(dir)),
        progress_(progress),
        pool_(pool),
        specs_(quantized_matrices(options_, config_, &report_.native)),
        shards_(loader.index(), config_, specs_),
        context_{config_, loader.engram_hashes(), loader.engram_token_map(), options.numerics, pool, nullptr} {}

  Result<QuantizeReport> run(const std::vector<DatasetRow>& rows) {
    RETURN_IF_ERROR(check());
    count(rows);
    ASSIGN_OR_RETURN(GlobalWeights globals, loader_.load_globals(pool_));
    RETURN_IF_ERROR(write_native_shards());
    if (options_.encode.output_metrics) {
      ASSIGN_OR_RETURN(residual_, ResidualMetrics::make(loader_, rows, progress_, pool_));
    }
    progress_.begin("quantize", total_units(rows));
    ASSIGN_OR_RETURN(CalibrationStream stream, CalibrationStream::begin(context_, globals, rows));
    for (int layer = 0; layer < config_.n_layers; ++layer) {
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

 private:
  Status check() {
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

  void count(const std::vector<DatasetRow>& rows) {
    report_.rows = static_cast<int64_t>(rows.size());
    for (const DatasetRow& row : rows) {
      const auto n = static_cast<int64_t>(row.ids.size());
      report_.tokens += n;
      report_.longest_row = std::max(report_.longest_row, n);
    }
  }

  // Progress is counted in weights; running a token through a layer costs about as much as encoding 1 / kWeightsPerUnit
  // of the weights that it meets. Shows how far the run is; nothing else depends on it.
  double units_per_token(int block) const {
    const bool is_drafter = block >= config_.n_layers;
    const double active = static_cast<double>(is_drafter ? config_.drafter.n_active : config_.n_active);
    const double share = active / static_cast<double>(is_drafter ? config_.drafter.n_experts : config_.n_experts);
    double weights = 0;
    for (const MatrixSpec& spec : block_matrices(config_, block)) {
      weights += static_cast<double>(spec.in * spec.out) * (is_routed(spec) ? share : 1.0);
    }
    return weights / kWeightsPerUnit;
  }
  double head_units_per_token() const { return static_cast<double>(config_.vocab * config_.d_model) / kWeightsPerUnit; }

  int64_t total_units(const std::vector<DatasetRow>& rows) const {
    int64_t total = 0;
    for (const MatrixSpec& spec : specs_) total += spec.in * spec.out;
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

  Status write_native_shards() {
    for (const ShardPlan::Shard& shard : shards_.shards()) {
      if (progress_.is_cancelled()) return cancelled("stopped while copying native tensors");
      if (shard.block == -1) RETURN_IF_ERROR(write_shard(dir_, shard, loader_.index(), {}));
    }
    return ok_status();
  }

  // The block's matrices without the drafter's main_proj, which is encoded before the first stage.
  BlockJob job_of(int block) const {
    const bool is_drafter = block >= config_.n_layers;
    BlockJob job{context_,
                 options_.encode,
                 block_matrices(config_, block),
                 {},
                 block_prefix(config_, block),
                 is_drafter ? config_.drafter.n_experts : config_.n_experts,
                 residual_.of_layer(block)};
    std::erase_if(job.specs,
                  [](const MatrixSpec& s) { return s.kind == MatrixKind::kMainProj || s.kind == MatrixKind::kHead; });
    for (MatrixSpec& spec : job.specs) {
      job.k2.push_back(width_of(options_, spec, config_.n_layers));
      spec.is_quantizable = spec.is_quantizable && job.k2.back() != kNativeWidth;
    }
    return job;
  }

  static void add_encoded(BlockWeights& weights, const std::vector<MatrixSpec>& specs, EncodedTensors* out) {
    for (const MatrixSpec& spec : specs) {
      const Linear* linear = find_linear(weights, spec);
      if (spec.is_quantizable && linear != nullptr) out->emplace_back(spec.stem, *linear->exl3());
    }
  }

  Status encode(const BlockJob& job, const BlockCapture& capture, BlockWeights& weights) {
    report_.coverage.emplace_back();
    return encode_block(job, capture, weights, &report_.matrices, &report_.coverage.back(), progress_);
  }

  Status run_block(CalibrationStream& stream, int layer) {
    ASSIGN_OR_RETURN(BlockWeights weights, loader_.load_block(pool_, layer));
    const BlockJob job = job_of(layer);
    {
      BlockCapture capture(job.specs, false, pool_);
      RETURN_IF_ERROR(stream.observe_layer(context_, weights, layer, &capture, progress_, units_per_token(layer)));
      capture.finish();
      RETURN_IF_ERROR(encode(job, capture, weights));
    }
    EncodedTensors encoded;
    add_encoded(weights, job.specs, &encoded);
    RETURN_IF_ERROR(write_shard(dir_, shards_.of_block(layer), loader_.index(), encoded));
    return stream.advance_layer(context_, weights, layer, progress_, units_per_token(layer));
  }

  // A matrix outside the blocks.
  const MatrixSpec* find_spec(MatrixKind kind) const {
    const auto it = std::find_if(specs_.begin(), specs_.end(), [&](const MatrixSpec& s) { return s.kind == kind; });
    return it == specs_.end() ? nullptr : &*it;
  }

  Status encode_root(const MatrixSpec& spec, BlockCapture& capture, Linear* linear) {
    capture.finish();
    const Hessian* hessian = capture.hessian_of(spec);
    MatrixRecord record;
    if (hessian != nullptr) describe_hessian(*hessian, &record);
    RETURN_IF_ERROR(encode_matrix(options_.encode, {spec, width_of(options_, spec, config_.n_layers), linear, &record},
                                  hessian == nullptr ? nullptr : hessian->sum.data(), {}, pool_));
    report_.matrices.push_back(std::move(record));
    progress_.advance(spec.in * spec.out, spec.stem);
    return ok_status();
  }

  Status run_head(CalibrationStream& stream, GlobalWeights& globals, const std::vector<DatasetRow>& rows) {
    EncodedTensors encoded;
    if (const MatrixSpec* spec = find_spec(MatrixKind::kHead)) {
      BlockCapture capture({*spec}, false, pool_);
      RETURN_IF_ERROR(stream.observe_head(context_, globals, &capture, progress_, head_units_per_token()));
      RETURN_IF_ERROR(encode_root(*spec, capture, &globals.head));
      encoded.emplace_back(spec->stem, *globals.head.exl3());
    }
    RETURN_IF_ERROR(write_shard(dir_, shards_.of_block(ShardPlan::kHead), loader_.index(), encoded));
    const auto shortest = std::min_element(
        rows.begin(), rows.end(), [](const DatasetRow& a, const DatasetRow& b) { return a.ids.size() < b.ids.size(); });
    report_.probe_ids = shortest->ids;
    report_.probe_logits = stream.logits(context_, globals, static_cast<size_t>(shortest - rows.begin()));
    return ok_status();
  }

  Status run_drafter(const CalibrationStream& stream, const GlobalWeights& globals) {
    ASSIGN_OR_RETURN(DrafterGlobals drafter, loader_.load_drafter_globals(pool_));
    const MatrixSpec* main_proj = find_spec(MatrixKind::kMainProj);
    if (main_proj != nullptr) {
      BlockCapture capture({*main_proj}, true, pool_);
      RETURN_IF_ERROR(DraftCalibration::observe_taps(context_, drafter, stream, &capture, progress_));
      RETURN_IF_ERROR(encode_root(*main_proj, capture, &drafter.main_proj));
    }
    DraftCalibration drafts = DraftCalibration::begin(context_, globals, drafter, stream, options_.draft_stride);
    report_.draft_calls = drafts.n_calls();
    for (int stage = 0; stage < config_.drafter.n_stages; ++stage) {
      const int block = config_.n_layers + stage;
      ASSIGN_OR_RETURN(BlockWeights weights, loader_.load_block(pool_, block));
      const BlockJob job = job_of(block);
      BlockCapture capture(job.specs, true, pool_);
      RETURN_IF_ERROR(drafts.observe_stage(context_, weights, stage, &capture, progress_, units_per_token(block)));
      capture.finish();
      RETURN_IF_ERROR(encode(job, capture, weights));
      EncodedTensors encoded;
      add_encoded(weights, job.specs, &encoded);
      if (stage == 0 && main_proj != nullptr) encoded.emplace_back(main_proj->stem, *drafter.main_proj.exl3());
      RETURN_IF_ERROR(write_shard(dir_, shards_.of_block(block), loader_.index(), encoded));
      if (stage + 1 < config_.drafter.n_stages) {
        RETURN_IF_ERROR(drafts.advance_stage(context_, weights, stage, progress_, units_per_token(block)));
      }
    }
    return ok_status();
  }

  const WeightLoader& loader_;
  const Config& config_;
  const QuantizeOptions& options_;
  const fs::path dir_;
  Progress& progress_;
  ThreadPool& pool_;
  QuantizeReport report_;
  const std::vector<MatrixSpec> specs_;  // to be quantized
  const ShardPlan shards_;
  const CallContext context_;
  ResidualMetrics residual_;
};

}  // namespace

Status check_options(const QuantizeOptions& options) {
  const codec::Codebook codebook = options.encode.codec.codebook;
  if (!options.plan || options.bits != 0) RETURN_IF_ERROR(check_width("--bits", options.bits, codebook));
  if (options.dense_bits) RETURN_IF_ERROR(check_width("--dense-bits", *options.dense_bits, codebook));
  if (options.head_bits) RETURN_IF_ERROR(check_width("--head-bits", *options.head_bits, codebook));
  if (options.drafter_bits) RETURN_IF_ERROR(check_width("--drafter-bits", *options.drafter_bits, codebook));
  if (options.draft_stride < 1)
    return invalid_argument("--draft-stride: expected at least 1, found " + std::to_string(options.draft_stride));
  return ok_status();
}

std::vector<MatrixSpec> quantized_matrices(const QuantizeOptions& options, const Config& config,
                                           std::vector<NativeMatrix>* native) {
  std::vector<MatrixSpec> out;
  for (MatrixSpec& spec : all_matrices(config)) {
    if (!spec.is_quantizable) {
      native->push_back({spec.stem, "dimensions " + std::to_string(spec.in) + " x " + std::to_string(spec.out) +
                                        " are not both multiples of 128"});
    } else if (is_kept(options, spec)) {
      native->push_back({spec.stem, projection_name(spec) + " stays native by choice (--keep-native, or the layout)"});
    } else if (width_of(options, spec, config.n_layers) == kNativeWidth) {
      native->push_back({spec.stem, "native by the plan"});
    } else {
      out.push_back(std::move(spec));
    }
  }
  return out;
}

Status check_widths(const QuantizeOptions& options, const Config& config) {
  std::set<std::string> projections;
  std::map<std::string, bool> whole;  // wo_a, or an expert -> its first matrix is native
  for (const MatrixSpec& spec : all_matrices(config)) {
    projections.insert(projection_name(spec));
    if (!spec.is_quantizable) continue;
    const int k2 = width_of(options, spec, config.n_layers);
    if (k2 < 0) {
      return failed_precondition("the plan gives no width for '" + spec.stem + "'; add it, or give --bits for what it leaves out");
    }
    if (k2 != kNativeWidth && !codec::is_searchable_width(k2, options.encode.codec.codebook)) {
      return failed_precondition("'" + spec.stem + "': width " + width_text_of(k2) + " does not exist for codebook " +
                                 std::string(codec::codebook_name(options.encode.codec.codebook)));
    }
    if (spec.kind != MatrixKind::kWoA && !is_routed(spec)) continue;
    const std::string group = is_routed(spec) ? spec.stem.substr(0, spec.stem.rfind('.')) : module_stem(spec);
    const auto [it, is_first] = whole.emplace(group, k2 == kNativeWidth);
    if (!is_first && it->second != (k2 == kNativeWidth)) {
      return failed_precondition("'" + group + "': expected all of its matrices native or none");
    }
  }
  for (const std::string& name : options.keep_native) {
    if (projections.count(name) == 0) {
      return invalid_argument("--keep-native: expected a projection such as attn.wkv, found '" + name + "'");
    }
  }
  return ok_status();
}

int width_of(const QuantizeOptions& options, const MatrixSpec& spec, int n_layers) {
  if (is_kept(options, spec)) return kNativeWidth;
  if (options.plan) {
    if (const std::optional<int> k2 = options.plan->width_of(spec, n_layers)) return *k2;
    if (options.bits == 0) return -1;
  }
  double bits = options.bits;
  if (spec.kind == MatrixKind::kHead)
    bits = options.head_bits.value_or(bits);
  else if (spec.kind == MatrixKind::kMainProj || spec.block >= n_layers)
    bits = options.drafter_bits.value_or(bits);
  else if (!is_routed(spec))
    bits = options.dense_bits.value_or(bits);
  return static_cast<int>(2 * bits);
}

Result<QuantizeReport> quantize(const WeightLoader& loader, const std::vector<DatasetRow>& rows,
                                const QuantizeOptions& options, const fs::path& shard_dir, Progress& progress,
                                ThreadPool& pool) {
  return Run(loader, options, shard_dir, progress, pool).run(rows);
}

}  // namespace espalier
