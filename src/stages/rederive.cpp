#include "stages/rederive.h"

#include <algorithm>

#include "base/file.h"
#include "base/rng.h"
#include "model/coverage.h"
#include "model/dataset.h"
#include "model/weights.h"
#include "stages/provenance.h"
#include "stages/quantize/reencode.h"
#include "stages/run_record.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

// Sizes and headers of the checkpoint's files against the pack's lock: seconds instead of hashing everything.
Status check_source(const RederiveOptions& options) {
  ASSIGN_OR_RETURN(const std::string text, read_text_file(options.pack / "source.lock.json", 64u << 20));
  ASSIGN_OR_RETURN(const std::vector<FileRecord> lock, parse_source_lock(text, "source.lock.json"));
  ASSIGN_OR_RETURN(const std::vector<std::string> problems,
                   check_source_headers(options.checkpoint, options.engram_dir, lock));
  if (problems.empty()) return ok_status();
  return failed_precondition("'" + options.checkpoint.string() + "' is not the checkpoint that the pack was made from: " +
                             problems.front());
}

std::vector<std::string> draw(std::vector<std::string> stems, int64_t count, uint64_t seed) {
  const CounterRng rng(seed, "rederive");
  const size_t n = std::min(stems.size(), static_cast<size_t>(count));
  for (size_t i = 0; i < n; ++i) {
    const auto j = i + static_cast<size_t>(rng.uniform(i) * static_cast<double>(stems.size() - i));
    std::swap(stems[i], stems[j]);
  }
  stems.resize(n);
  return stems;
}

}  // namespace

Result<RederiveReport> rederive(const RederiveOptions& options, Progress& progress, ThreadPool& pool) {
  if (options.count < 1) return invalid_argument("--rederive: expected at least 1, found " + std::to_string(options.count));
  ASSIGN_OR_RETURN(const std::string run_text, read_text_file(options.pack / "run.json", 256u << 20));
  ASSIGN_OR_RETURN(const RunRecord run, parse_run_record(run_text, "'" + (options.pack / "run.json").string() + "'"));
  if (run.backend != kBackend) {
    return unimplemented("run.json: the pack was made on '" + run.backend + "', this program re-encodes on '" + kBackend +
                         "'; run it where the pack was made");
  }
  RETURN_IF_ERROR(check_source(options));
  ASSIGN_OR_RETURN(Dataset data, load_dataset(options.data));
  data.rows = spread_rows(data.rows, run.rows);
  if (const std::string found = dataset_content_sha256(data.rows); found != run.calibration_content_sha256) {
    return failed_precondition("'" + options.data.string() + "': content sha256 " + found + ", the pack was made with " +
                               run.calibration_content_sha256);
  }
  LoadOptions load;
  load.engram_dir = options.engram_dir.string();
  ASSIGN_OR_RETURN(const WeightLoader native, WeightLoader::open(options.checkpoint.string(), load));
  ASSIGN_OR_RETURN(const WeightLoader pack, WeightLoader::open(options.pack.string(), load));

  std::vector<std::string> stems;
  for (const MatrixSpec& spec : all_matrices(pack.config())) {
    if (!exl3_stem(pack.index(), spec).empty()) stems.push_back(spec.stem);
  }
  RederiveReport report;
  report.stems = draw(std::move(stems), options.count, options.seed);
  ASSIGN_OR_RETURN(const std::vector<Reencoded> made,
                   reencode(native, pack, data.rows, run.quantize, report.stems, progress, pool));
  for (const Reencoded& r : made) {
    if (!r.difference.empty()) {
      report.problems.push_back("'" + r.stem + "' encoded again from the checkpoint differs in " + r.difference);
    }
  }
  if (made.size() != report.stems.size()) {
    return internal_error("rederive: " + std::to_string(made.size()) + " of " + std::to_string(report.stems.size()) +
                          " matrices were encoded");
  }
  return report;
}

}  // namespace espalier
