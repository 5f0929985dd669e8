#include "stages/calibrate_model.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/hash.h"
#include "base/system_memory.h"
#include "format/json.h"
#include "model/calibration_memory.h"
#include "stages/calibrate/routing_counter.h"
#include "stages/calibrate_export.h"
#include "stages/pack/pack.h"
#include "stages/provenance.h"
#include "stages/quantize/draft_stream.h"
#include "stages/quantize/stream.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kProgramBytes = uint64_t{64} << 20;
constexpr double kDefaultPart = 0.8;  // of the memory that is available
constexpr int64_t kMostBroken = 10;   // one sequence in so many

Result<Dataset> load_rows(const CalibrateOptions& options, const Config& config) {
  ASSIGN_OR_RETURN(Dataset data, load_dataset(options.data));
  RETURN_IF_ERROR(check_dataset_fits(data, config.vocab, config.max_positions, options.data.filename().string()));
  data.rows = spread_rows(data.rows, options.rows);
  return data;
}

std::string megabytes(uint64_t bytes) {
  return std::to_string((bytes + 999'999) / 1'000'000) + " MB";
}

// Bytes of the numbers in routing.safetensors, and room for names and the record.
uint64_t statistics_bytes(const Config& c, int64_t n_domains) {
  const int64_t experts = c.n_layers * c.n_experts + c.drafter.n_stages * c.drafter.n_experts;
  return static_cast<uint64_t>(experts * (n_domains * 36 + 8) + experts * 160 + (1 << 20));
}

Result<CalibrateEstimate> estimate(const CalibrateOptions& options, const Config& c, const Dataset& data) {
  CalibrateEstimate out;
  out.rows = static_cast<int64_t>(data.rows.size());
  out.tokens = data.n_tokens();
  out.limit_bytes = options.memory_limit;
  if (out.limit_bytes == 0)
    out.limit_bytes = static_cast<uint64_t>(kDefaultPart * static_cast<double>(available_memory_bytes()));
  int64_t longest = 0;
  uint64_t longest_state = 0;
  std::vector<uint64_t> states;
  for (const DatasetRow& row : data.rows) {
    const auto n = static_cast<int64_t>(row.ids.size());
    longest = std::max(longest, n);
    states.push_back(row_state_bytes(c, n, options.draft_stride));
    longest_state = std::max(longest_state, states.back());
    out.state_bytes += states.back();
  }
  std::error_code ec;
  const uint64_t file_bytes = fs::file_size(options.data, ec);
  const uint64_t base = kProgramBytes + (ec ? 0 : file_bytes) + static_cast<uint64_t>(out.tokens) * 5 +
                        static_cast<uint64_t>(c.vocab) * 256 + row_workspace_bytes(c, longest);
  const uint64_t limit = out.limit_bytes == 0 ? UINT64_MAX : out.limit_bytes;
  const uint64_t unpacked = base + block_weight_bytes(c, true);
  out.unpacked_experts = unpacked <= limit / 2;
  // As stored, one expert at a time is unpacked per thread; matrices outside the experts stay packed as well.
  out.fixed_bytes = out.unpacked_experts ? unpacked : base + block_weight_bytes(c, false);
  if (out.fixed_bytes + longest_state > limit) {
    return resource_exhausted("calibrate: needs " + megabytes(out.fixed_bytes + longest_state) +
                              " of memory for the longest row of " + std::to_string(longest) + " tokens, the limit is " +
                              megabytes(limit) + "; shorten the rows or raise --memory-limit");
  }
  uint64_t held = 0, most = 0;
  for (size_t i = 0; i < states.size(); ++i) {
    if (held > 0 && out.fixed_bytes + held + states[i] > limit) {
      out.group_ends.push_back(i);
      held = 0;
    }
    held += states[i];
    most = std::max(most, held);
  }
  out.group_ends.push_back(states.size());
  out.peak_bytes = out.fixed_bytes + most;
  out.disk_bytes = statistics_bytes(c, static_cast<int64_t>(data.domains().size()));
  if (!options.out.empty()) {
    const fs::path parent = fs::absolute(options.out, ec).parent_path();
    const fs::space_info space = fs::space(parent, ec);
    if (!ec && space.available < out.disk_bytes) {
      return resource_exhausted("calibrate: needs " + megabytes(out.disk_bytes) + " on the disk of '" +
                                options.out.string() + "', " + megabytes(space.available) + " are free");
    }
  }
  return out;
}

// One run over one checkpoint.
class Run {
 public:
  Run(const WeightLoader& loader, const CalibrateOptions& options, const Dataset& data, CalibrateReport* report,
      Progress& progress, ThreadPool& pool)
      : loader_(loader),
        config_(loader.config()),
        options_(options),
        data_(data),
        domains_(data.domains()),
        report_(report),
        progress_(progress),
        pool_(pool),
        context_{config_, loader.engram_hashes(), loader.engram_token_map(), options.numerics, pool, nullptr},
        backbone_(config_.n_layers, config_.n_experts, n_domains(), options.pruning, pool),
        drafter_(config_.drafter.n_stages, config_.drafter.n_experts, n_domains(), std::nullopt, pool),
        broken_(data.rows.size()) {
    for (const DatasetRow& row : data.rows)
      domain_of_.push_back(std::find(domains_.begin(), domains_.end(), row.domain) - domains_.begin());
    if (options.export_layer >= 0)
      export_.emplace(block_matrices(config_, options.export_layer), pool);
  }

  Status run() {
    ASSIGN_OR_RETURN(const GlobalWeights globals, loader_.load_globals(pool_));
    int64_t units = 0;
    for (const DatasetRow& row : data_.rows) {
      units += static_cast<int64_t>(row.ids.size()) * config_.n_layers;
      units += drafted_rows(static_cast<int64_t>(row.ids.size())) * config_.drafter.n_stages;
    }
    progress_.begin("calibrate", units);
    size_t begin = 0;
    for (size_t end : report_->estimate.group_ends) {
      RETURN_IF_ERROR(run_group(globals, begin, end));
      begin = end;
    }
    report_->rows = static_cast<int64_t>(data_.rows.size());
    report_->tokens = data_.n_tokens();
    report_->dropped_tokens = backbone_.dropped() + drafter_.dropped();
    report_->broken_sequences = std::count(broken_.begin(), broken_.end(), true);
    RoutingStatistics& s = report_->statistics;
    s.domains = domains_;
    s.share = backbone_.shares();
    s.reads_routed = backbone_.reads_routed();
    s.reads_served = backbone_.reads_served();
    s.counts = backbone_.counts();
    if (config_.drafter.n_stages > 0) s.drafter_counts = drafter_.counts();
    report_->coverage = audit_coverage(config_, *s.counts, s.drafter_counts ? &*s.drafter_counts : nullptr);
    return ok_status();
  }

 private:
  int64_t n_domains() const { return static_cast<int64_t>(domains_.size()); }
  int64_t drafted_rows(int64_t n_tokens) const {
    return static_cast<int64_t>(DraftCalibration::draft_positions(n_tokens, options_.draft_stride).size()) *
           config_.drafter.block_size;
  }

  // A token of row r was not finite. More than one sequence in kMostBroken ends the run.
  Status mark_broken(size_t r, int block) {
    broken_[r] = true;
    const int64_t n = std::count(broken_.begin(), broken_.end(), true);
    if (n * kMostBroken <= static_cast<int64_t>(data_.rows.size())) return ok_status();
    return data_loss("calibrate: activations are not finite in " + std::to_string(n) + " of " +
                     std::to_string(data_.rows.size()) + " sequences, in row '" + data_.rows[r].id + "' at block " +
                     block_prefix(config_, block) + "; is the checkpoint damaged?");
  }

  Status run_group(const GlobalWeights& globals, size_t begin, size_t end) {
    // A stream per row, so that every row is run under its own name.
    std::vector<CalibrationStream> streams;
    for (size_t r = begin; r < end; ++r) {
      ASSIGN_OR_RETURN(CalibrationStream stream, CalibrationStream::begin(context_, globals, {data_.rows[r]}));
      streams.push_back(std::move(stream));
    }
    for (int layer = 0; layer < config_.n_layers; ++layer) {
      ASSIGN_OR_RETURN(const BlockWeights weights, loader_.load_block(pool_, layer));
      for (size_t r = begin; r < end; ++r) {
        CalibrationStream& stream = streams[r - begin];
        if (export_ && options_.export_layer == layer)
          RETURN_IF_ERROR(stream.observe_layer(context_, weights, layer, &*export_, progress_));
        backbone_.begin_row(layer, domain_of_[r]);
        RETURN_IF_ERROR(stream.advance_layer(context_, weights, layer, progress_, 1.0, &backbone_));
        if (backbone_.has_dropped()) RETURN_IF_ERROR(mark_broken(r, layer));
      }
      if (export_ && options_.export_layer == layer && end == data_.rows.size())
        RETURN_IF_ERROR(export_->write(options_.export_file, context_, weights, options_.routing_exponent));
    }
    return config_.drafter.n_stages > 0 ? run_drafter(globals, streams, begin) : ok_status();
  }

  Status run_drafter(const GlobalWeights& globals, const std::vector<CalibrationStream>& streams, size_t begin) {
    ASSIGN_OR_RETURN(const DrafterGlobals drafter, loader_.load_drafter_globals(pool_));
    std::vector<DraftCalibration> drafts;
    for (const CalibrationStream& stream : streams) {
      ASSIGN_OR_RETURN(DraftCalibration calls,
                       DraftCalibration::begin(context_, globals, drafter, stream, options_.draft_stride));
      drafts.push_back(std::move(calls));
      report_->draft_calls += drafts.back().n_calls();
    }
    for (int stage = 0; stage < config_.drafter.n_stages; ++stage) {
      ASSIGN_OR_RETURN(const BlockWeights weights, loader_.load_block(pool_, config_.n_layers + stage));
      for (size_t i = 0; i < drafts.size(); ++i) {
        drafter_.begin_row(stage, domain_of_[begin + i]);
        RETURN_IF_ERROR(drafts[i].advance_stage(context_, weights, stage, progress_, 1.0, &drafter_));
        if (drafter_.has_dropped()) RETURN_IF_ERROR(mark_broken(begin + i, config_.n_layers + stage));
      }
    }
    return ok_status();
  }

  const WeightLoader& loader_;
  const Config& config_;
  const CalibrateOptions& options_;
  const Dataset& data_;
  const std::vector<std::string> domains_;
  CalibrateReport* report_;
  Progress& progress_;
  ThreadPool& pool_;
  const CallContext context_;
  RoutingCounter backbone_;
  RoutingCounter drafter_;
  std::vector<bool> broken_;
  std::vector<int64_t> domain_of_;
  std::optional<ExportCapture> export_;
};

// No time, thread count, path or host: a function of the inputs and options.
std::string record_json(const CalibrateReport& report, const std::map<std::string, std::string>& inputs,
                        const std::string& routing_sha256, const Dataset& data) {
  Json doc = {{"schema", kCalibrationSchema}, {"inputs", inputs}, {"routing_sha256", routing_sha256},
              {"rows", report.rows},          {"tokens", report.tokens},
              {"draft_calls", report.draft_calls},
              {"dropped_tokens", report.dropped_tokens},
              {"broken_sequences", report.broken_sequences}};
  std::map<std::string, std::pair<int64_t, int64_t>> domains;
  for (const DatasetRow& row : data.rows) {
    ++domains[row.domain].first;
    domains[row.domain].second += static_cast<int64_t>(row.ids.size());
  }
  for (const auto& [name, n] : domains) doc["domains"][name] = {{"rows", n.first}, {"tokens", n.second}};
  Json thin = Json::array();
  for (const ThinExpert& e : report.coverage.thin)
    thin.push_back({{"name", e.name}, {"tokens", e.tokens}, {"w2", e.is_w2_thin}});
  doc["coverage"] = {{"experts", report.coverage.n_experts},
                     {"fewest_tokens", report.coverage.fewest_tokens},
                     {"mean_tokens", report.coverage.mean_tokens},
                     {"without_tokens", report.coverage.without_tokens},
                     {"thin", thin}};
  return dump_json(doc, 1) + "\n";
}

Status write_folder(const CalibrateOptions& options, const Config& config, const Dataset& data, const fs::path& dir,
                    CalibrateReport& report) {
  std::map<std::string, std::string> inputs = {{"calibration_sha256", data.sha256},
                                               {"calibration_content_sha256", dataset_content_sha256(data.rows)},
                                               {"numerics", std::string(numerics_name(options.numerics))},
                                               {"draft_stride", std::to_string(options.draft_stride)},
                                               {"rows", std::to_string(data.rows.size())},
                                               {"tool", options.tool}};
  ASSIGN_OR_RETURN(inputs["model_identity"], model_identity(options.checkpoint));
  if (options.pruning) {
    inputs["expert_top_p"] = dump_json(Json(options.pruning->top_p));
    inputs["min_experts"] = std::to_string(options.pruning->min_experts);
  }
  report.statistics.metadata = inputs;
  RETURN_IF_ERROR(write_routing_statistics(dir / kRoutingFile, report.statistics, config));
  ASSIGN_OR_RETURN(report.statistics.sha256, sha256_file_hex(dir / kRoutingFile));
  return write_text_file(dir / kCalibrationFile, record_json(report, inputs, report.statistics.sha256, data));
}

}  // namespace

Result<CalibrateEstimate> estimate_calibration(const CalibrateOptions& options) {
  ASSIGN_OR_RETURN(const Config config, load_config(options.checkpoint));
  ASSIGN_OR_RETURN(const Dataset data, load_rows(options, config));
  return estimate(options, config, data);
}

Result<CalibrateReport> calibrate(const CalibrateOptions& options, Progress& progress, ThreadPool& pool) {
  RETURN_IF_ERROR(check_new_folder(options.out, options.checkpoint, "checkpoint"));
  ASSIGN_OR_RETURN(const Config config, load_config(options.checkpoint));
  if (options.export_layer >= config.n_layers) {
    return invalid_argument("--export-layer: expected a layer in 0.." + std::to_string(config.n_layers - 1) +
                            ", found " + std::to_string(options.export_layer));
  }
  ASSIGN_OR_RETURN(const Dataset data, load_rows(options, config));
  CalibrateReport report;
  ASSIGN_OR_RETURN(report.estimate, estimate(options, config, data));
  LoadOptions load;
  load.engram_dir = options.engram_dir;
  if (!report.estimate.unpacked_experts) load.residency = load.dense_residency = WeightResidency::kStored;
  ASSIGN_OR_RETURN(const WeightLoader loader, WeightLoader::open(options.checkpoint, load));
  ASSIGN_OR_RETURN(AtomicDirectory folder, AtomicDirectory::create(options.out));
  Status status = Run(loader, options, data, &report, progress, pool).run();
  if (status.ok()) status = write_folder(options, config, data, folder.partial_path(), report);
  if (status.ok() && progress.is_cancelled()) status = cancelled("stopped before the statistics were published");
  if (status.ok()) status = folder.commit();
  if (!status.ok()) {
    folder.discard();
    return status;
  }
  return report;
}

}  // namespace espalier
