// At equal bits and in the same format: are our matrices closer to the original than exllamav3's, and does the model
// notice?
//
// Method: docs/decisions/exl3-primary-comparison.md, written before any result. The other side is exllamav3 v1.4.1
// restated (bench/peer). The primary comparison, everything on the pocket model, one command (about half an hour on 2
// quiet AVX512-FP16 cores; an interrupted run resumes from the work folder):
//
//   build/release/bench/bench_exl3_quality --work build/exl3-quality > docs/measurements/exl3-quality-2026-11-30.txt
//
// and with what is reported beside it (the peer's own calibration, its 1.5 line, two more sign seeds):
//
//   build/release/bench/bench_exl3_quality --work build/exl3-quality --secondary --seeds 3
//
// Whoever chooses options of a preset looks at another data set (--panel models/pocket/data/sensitivity.jsonl), not at
// the panel. A trial: --rows 8 --calibration-rows 8 --layers 1 --widths 2. Without AVX512-FP16 the peer takes 5 times as
// long (AVX-512) or 60 times.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <mutex>

#include "bench/exl3_quality/report.h"
#include "codec/trellis.h"

namespace {

using namespace espalier;
using namespace espalier::quality;

std::atomic<bool> g_stop{false};

// Plain lines with the time that is left, on stderr.
class Lines : public Progress {
 public:
  explicit Lines(bool quiet) : quiet_(quiet) {}
  void begin(std::string_view phase, int64_t total) override {
    std::lock_guard lock(mutex_);
    phase_ = phase;
    total_ = total;
    done_ = 0;
    start_ = shown_ = Clock::now();
  }
  void advance(int64_t units, std::string_view detail) override {
    std::lock_guard lock(mutex_);
    done_ += units;
    const auto now = Clock::now();
    if (quiet_ || (now - shown_ < std::chrono::seconds(10) && done_ < total_)) return;
    shown_ = now;
    const double elapsed = std::chrono::duration<double>(now - start_).count();
    const double left = done_ > 0 ? elapsed / static_cast<double>(done_) * static_cast<double>(total_ - done_) : 0;
    std::fprintf(stderr, "%s: %ld/%ld, %.0f s, ETA %.0f s  %.*s\n", phase_.c_str(), static_cast<long>(done_),
                 static_cast<long>(total_), elapsed, left, static_cast<int>(detail.size()), detail.data());
  }
  bool is_cancelled() const override { return g_stop; }

 private:
  using Clock = std::chrono::steady_clock;
  const bool quiet_;
  std::mutex mutex_;
  std::string phase_;
  int64_t total_ = 0, done_ = 0;
  Clock::time_point start_, shown_;
};

struct Flags {
  std::string model = ESPALIER_SOURCE_DIR "/models/pocket";
  std::string work;
  std::string panel;  // empty: the model's own
  std::vector<std::string> widths = {"2", "2.5", "3", "4"};
  std::vector<std::string> arms = {"peer", "best", "fast"};
  bool secondary = false, json = false, quiet = false, skip_golden = false, skip_kl = false;
  int64_t rows = 0, calibration_rows = 0;
  int layers = 0, threads = 0, seeds = 1, golden_seeds = 5;
};

std::string machine_name() {
  std::ifstream info("/proc/cpuinfo");
  std::string line;
  while (std::getline(info, line)) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown CPU";
}

std::vector<std::string> all_arms(const Flags& flags) {
  std::vector<std::string> arms = flags.arms;
  if (flags.secondary) arms.insert(arms.end(), {"peer-own", "peer-1.5"});
  for (int seed = 1; seed < flags.seeds; ++seed) {
    for (const char* name : {"peer@", "best@", "fast@"}) arms.push_back(name + std::to_string(seed));
  }
  return arms;
}

bool is_primary(const Flags& flags) {
  const auto has = [](const std::vector<std::string>& list, const char* what) {
    return std::find(list.begin(), list.end(), what) != list.end();
  };
  return flags.panel.empty() && flags.rows == 0 && flags.calibration_rows == 0 && flags.layers == 0 && !flags.skip_kl &&
         has(flags.arms, "peer") && has(flags.arms, "best") && has(flags.widths, "2") && has(flags.widths, "2.5") &&
         has(flags.widths, "3") && has(flags.widths, "4");
}

Status run_pocket(const Flags& flags, Report& report, Progress& progress, ThreadPool& pool) {
  ASSIGN_OR_RETURN(const WeightLoader loader, WeightLoader::open(flags.model));
  ASSIGN_OR_RETURN(const Dataset calibration_set, load_dataset(flags.model + "/data/calibration.jsonl"));
  ASSIGN_OR_RETURN(const Dataset panel_set,
                   load_dataset(flags.panel.empty() ? flags.model + "/data/panel.jsonl" : flags.panel));
  const std::vector<DatasetRow> calibration = spread_rows(calibration_set.rows, flags.calibration_rows);
  const std::vector<DatasetRow> panel = spread_rows(panel_set.rows, flags.rows);
  std::vector<Arm> arms;
  CaptureOptions capture;
  capture.n_layers = flags.layers;
  for (const std::string& name : all_arms(flags)) {
    ASSIGN_OR_RETURN(Arm arm, arm_from_name(name));
    capture.all_tokens = capture.all_tokens || arm.all_tokens;
    arms.push_back(std::move(arm));
  }
  std::error_code ec;
  std::filesystem::create_directories(flags.work, ec);
  ASSIGN_OR_RETURN(const ExpertSet experts, load_experts(loader, calibration, capture, flags.work, progress, pool));
  report.identity = experts.identity;
  report.n_layers = experts.n_layers;
  report.calibration_rows = static_cast<int64_t>(calibration.size());
  report.panel_rows = static_cast<int64_t>(panel.size());
  for (const DatasetRow& row : calibration) report.calibration_tokens += static_cast<int64_t>(row.ids.size());
  for (const ExpertMatrix& m : experts.matrices) report.matrices.push_back(m.spec.stem);
  std::vector<EncodedSet> encoded;
  for (const std::string& width : flags.widths) {
    ASSIGN_OR_RETURN(const int k2, codec::width_from_bits(std::stod(width)));
    for (const Arm& arm : arms) {
      ASSIGN_OR_RETURN(EncodedSet set, encode_experts(arm, k2, experts, flags.work, progress, pool));
      report.arms.push_back({arm.name, k2, set.true_errors, {}, set.seconds, set.digest});
      encoded.push_back(std::move(set));
    }
  }
  if (flags.skip_kl) return ok_status();
  constexpr size_t kTogether = 12;  // candidates in memory, about 50 MB each
  for (size_t first = 0; first < encoded.size(); first += kTogether) {
    std::vector<PanelCandidate> candidates;
    for (size_t i = first; i < std::min(encoded.size(), first + kTogether); ++i) {
      candidates.push_back({report.arms[i].arm + " " + codec::width_text(report.arms[i].k2), &encoded[i]});
    }
    ASSIGN_OR_RETURN(std::vector<PanelScores> scores,
                     score_panel(loader, experts, candidates, panel, flags.work, progress, pool));
    for (size_t i = 0; i < scores.size(); ++i) report.arms[first + i].panel = std::move(scores[i]);
  }
  return ok_status();
}

Status run(const Flags& flags) {
  const auto start = std::chrono::steady_clock::now();
  ThreadPool pool(flags.threads);
  Lines progress(flags.quiet);
  Report report;
  report.machine = machine_name();
  report.n_threads = pool.n_threads();
  report.golden_seeds = flags.golden_seeds;
  report.is_complete = is_primary(flags);
  if (!flags.skip_golden) {
    const std::filesystem::path source = ESPALIER_SOURCE_DIR;
    ASSIGN_OR_RETURN(report.golden, run_golden({source / "tests/golden/exl3", source / "../shared/golden/exl3"},
                                               flags.golden_seeds, progress, pool));
  }
  if (!flags.work.empty()) RETURN_IF_ERROR(run_pocket(flags, report, progress, pool));
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::fputs(flags.json ? (report_json(report) + "\n").c_str() : report_text(report).c_str(), stdout);
  return ok_status();
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app{
      "Our EXL3 quantizer beside exllamav3's, restated: true error and panel KL on the pocket model, and the golden "
      "cases"};
  app.add_option("--work", flags.work,
                 "Folder for Hessians, encoded matrices and scores (resumes); without it only the golden cases run");
  app.add_option("--model", flags.model, "Native model folder with data/calibration.jsonl and data/panel.jsonl");
  app.add_option("--panel", flags.panel, "Another data set to score; options are chosen on data/sensitivity.jsonl");
  app.add_option("--widths", flags.widths, "Bits a weight")->delimiter(',');
  app.add_option("--arms", flags.arms, "peer, best, fast, best-plain, fast-plain, peer-own, peer-1.5, each also with @SEED")->delimiter(',');
  app.add_flag("--secondary", flags.secondary, "Adds peer-own and peer-1.5");
  app.add_option("--seeds", flags.seeds, "Sign seeds of peer, best and fast")->check(CLI::Range(1, 100));
  app.add_option("--golden-seeds", flags.golden_seeds, "Sign seeds of ours on the golden cases")
      ->check(CLI::Range(1, 100));
  app.add_option("--rows", flags.rows, "Panel rows, spread; 0 = all")->check(CLI::NonNegativeNumber);
  app.add_option("--calibration-rows", flags.calibration_rows, "Calibration rows, spread; 0 = all")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--layers", flags.layers, "First so many layers; 0 = all")->check(CLI::NonNegativeNumber);
  app.add_option("--threads", flags.threads, "0 = all usable CPUs")->check(CLI::NonNegativeNumber);
  app.add_flag("--json", flags.json, "One JSON document");
  app.add_flag("--quiet", flags.quiet, "No progress");
  app.add_flag("--skip-golden", flags.skip_golden, "Leave the golden cases out");
  app.add_flag("--skip-kl", flags.skip_kl, "Leave the panel out");
  CLI11_PARSE(app, argc, argv);
  std::signal(SIGINT, [](int) { g_stop = true; });
  std::signal(SIGTERM, [](int) { g_stop = true; });
  const Status status = run(flags);
  if (!status.ok()) {
    std::fprintf(stderr, "bench_exl3_quality: error: %s\n", std::string(status.message()).c_str());
    return 1;
  }
  return 0;
}
