#include "stages/make_pack.h"

#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/file.h"
#include "base/log.h"
#include "format/json.h"
#include "model/dataset.h"
#include "model/forward.h"
#include "stages/pack/convert.h"
#include "stages/pack/pack.h"
#include "stages/provenance.h"
#include "stages/make_library.h"
#include "stages/quantize/work_folder.h"
#include "stages/run_files.h"
#include "stages/run_record.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

// The finished pack, read from disk as any user of it reads it, must compute the very logits that the stream ended
// with. A state that was lost or reset between two layers during conversion shows here and nowhere else.
Status check_streamed(const MakePackOptions& options, const fs::path& dir, const QuantizeReport& report,
                      ThreadPool& pool) {
  LoadOptions load;
  load.engram_dir = options.engram_dir;
  load.residency = WeightResidency::kStored;
  auto loaded = Model::load(dir.string(), load, pool);
  if (!loaded.ok()) return std::move(loaded).error().with_context("self-check of the finished pack");
  const std::shared_ptr<const Model> model = std::move(loaded).value();
  SequenceState state(model->config());
  ForwardOptions forward_options;
  forward_options.numerics = options.quantize.numerics;
  forward_options.all_logits = true;
  ASSIGN_OR_RETURN(const ForwardResult result, forward(*model, state, report.probe_ids, forward_options, pool));
  const Tensor& a = result.logits;
  const Tensor& b = report.probe_logits;
  if (a.shape() != b.shape() || std::memcmp(a.data(), b.data(), static_cast<size_t>(a.size_bytes())) != 0) {
    return internal_error(
        "self-check: the finished pack's logits differ from the calibration stream's; the pack was not published");
  }
  return ok_status();
}

// Everything that the bytes of the pack depend on, by the names that a refusal to resume shows.
WorkFolder::Recipe recipe_of(const MakePackOptions& options, const Dataset& data, const std::vector<FileRecord>& lock) {
  WorkFolder::Recipe recipe = {{"program", options.tool},
                               {"backend", kBackend},
                               {"layout", std::string(layout_name(options.layout))},
                               {"data (sha256 of its rows)", calibration_facts(data).content_sha256},
                               {"plan (sha256)", options.plan_sha256.empty() ? "none" : options.plan_sha256}};
  const Json values = options_json(options.quantize, options.rows);
  for (const auto& [name, value] : values.items()) recipe["option " + name] = dump_json(value);
  for (const FileRecord& file : lock) {
    recipe["checkpoint file " + file.name] = std::to_string(file.size_bytes) + " bytes, sha256 " + file.sha256;
  }
  return recipe;
}

// The finished shards under their names in the pack. Links, so that assembling can be done again after a kill.
Status take_shards(const fs::path& from, const fs::path& to) {
  std::error_code ec;
  for (const auto& item : fs::directory_iterator(from, ec)) {
    const fs::path target = to / item.path().filename();
    fs::create_hard_link(item.path(), target, ec);
    if (ec) fs::copy_file(item.path(), target, ec);
    if (ec) return resource_exhausted("cannot copy '" + item.path().string() + "' to '" + target.string() + "': " + ec.message());
  }
  return ok_status();
}

// Whether a run that ended so can go on later: it was stopped, or the machine had not enough of something.
bool is_resumable(const Status& status) {
  return status.code() == StatusCode::kCancelled || status.code() == StatusCode::kResourceExhausted ||
         status.code() == StatusCode::kUnavailable;
}

Result<WorkFolder> open_work(const MakePackOptions& options, const WorkFolder::Recipe& recipe) {
  fs::path out = options.out.lexically_normal();
  if (!out.has_filename()) out = out.parent_path();
  const std::string name = out.filename().string() + ".work";
  const fs::path scratch = options.work_dir.empty() ? fs::path() : options.work_dir / name;
  return WorkFolder::open(out.parent_path() / name, scratch, recipe, options.resume);
}

Status build(const MakePackOptions& options, const WeightLoader& loader, const Dataset& data,
             const std::vector<FileRecord>& lock, const WorkFolder* work, const fs::path& dir, MakePackReport* report,
             Progress& progress, ThreadPool& pool) {
  RETURN_IF_ERROR(write_text_file(dir / "source.lock.json", source_lock_json(lock)));
  ASSIGN_OR_RETURN(report->details, quantize(loader, data.rows, options.quantize, work != nullptr ? work->shards() : dir, progress, pool));
  if (work != nullptr) RETURN_IF_ERROR(take_shards(work->shards(), dir));
  const QuantizeReport& details = report->details;
  for (const BlockCoverage& c : details.coverage) {
    if (c.without_tokens.empty()) continue;
    log(LogLevel::kWarning, c.prefix + "ffn: " + std::to_string(c.without_tokens.size()) + " of " +
                                std::to_string(c.expert_tokens.size()) +
                                " experts saw no calibration token; the layer's prior stands in");
  }

  if (options.layout != Layout::kExllamav3) RETURN_IF_ERROR(regroup_shards(dir, options.layout, loader.config()));
  ASSIGN_OR_RETURN(const PackSummary summary, summarise_shards(dir));
  PackFacts facts;
  facts.producer = options.tool;
  facts.calibration_rows = details.rows;
  facts.calibration_cols = details.longest_row;
  RETURN_IF_ERROR(write_pack_description(dir, options.checkpoint, options.layout, facts));
  ASSIGN_OR_RETURN(const std::vector<std::string> side_files, copy_side_files(options.checkpoint, dir));
  if (!details.probe_ids.empty()) RETURN_IF_ERROR(check_streamed(options, dir, details, pool));
  for (const PackText& t : run_records(options, calibration_facts(data), details, summary)) {
    RETURN_IF_ERROR(write_text_file(dir / t.name, t.text));
  }
  ASSIGN_OR_RETURN(report->bytes, write_manifest(dir, progress));
  report->bpw = summary.bpw;
  report->matrices = summary.matrices;
  if (progress.is_cancelled()) return cancelled("stopped before the pack was published");
  return ok_status();
}

}  // namespace

Result<MakePackReport> make_pack(const MakePackOptions& options, Progress& progress, ThreadPool& pool) {
  RETURN_IF_ERROR(check_options(options.quantize));
  RETURN_IF_ERROR(check_new_folder(options.out, options.checkpoint, "checkpoint"));
  // The cheap inputs first, so that a wrong one costs seconds.
  ASSIGN_OR_RETURN(Dataset data, load_dataset(options.data));
  LoadOptions load;
  load.engram_dir = options.engram_dir;
  ASSIGN_OR_RETURN(const WeightLoader loader, WeightLoader::open(options.checkpoint, load));
  RETURN_IF_ERROR(check_widths(options.quantize, loader.config()));
  RETURN_IF_ERROR(
      check_dataset_fits(data, loader.config().vocab, loader.config().max_positions, options.data.filename().string()));
  data.rows = spread_rows(data.rows, options.rows);

  MakePackOptions own = options;
  std::optional<WidthLibrary> library;
  if (!options.library.empty()) {
    ASSIGN_OR_RETURN(library, open_library(options, data));
    own.quantize.library = &*library;
  }

  if (library && (options.resume || !options.work_dir.empty())) {
    return invalid_argument("--resume and --work-dir: not together with --library, which keeps what is done by itself; run it again without them");
  }

  ASSIGN_OR_RETURN(AtomicDirectory folder, AtomicDirectory::create(options.out));
  const auto lock = lock_files(options.checkpoint, progress);
  Status status = lock.status();
  std::optional<WorkFolder> work;
  if (status.ok() && !library) {
    auto opened = open_work(options, recipe_of(options, data, *lock));
    status = opened.status();
    if (opened.ok()) work.emplace(std::move(*opened));
    own.quantize.work = work ? &*work : nullptr;
  }
  MakePackReport report;
  if (status.ok()) status = build(own, loader, data, *lock, own.quantize.work, folder.partial_path(), &report, progress, pool);
  if (status.ok()) status = folder.commit();
  if (!status.ok()) folder.discard();
  if (work && !is_resumable(status)) work->discard();
  if (!status.ok() && work && is_resumable(status)) {
    return Status(status.code(), status.message() + "; what is done is kept, --resume goes on from there");
  }
  if (!status.ok()) return status;
  return report;
}

}  // namespace espalier
