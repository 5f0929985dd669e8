// `verify --rederive N`: encodes N random matrices of a pack again from the checkpoint and compares bytes, after the inputs
// proved to be those of the run (source.lock.json, run.json). Sequence of provenance, pack records and the stage quantize.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "base/progress.h"
#include "base/status.h"
#include "base/thread_pool.h"

namespace espalier {

struct RederiveOptions {
  std::filesystem::path pack;
  std::filesystem::path checkpoint;
  std::filesystem::path data;  // the calibration set of the run
  std::filesystem::path engram_dir;
  int64_t count = 0;  // matrices, drawn with `seed`; at least the pack's number of matrices means all
  uint64_t seed = 0;
};

struct RederiveReport {
  std::vector<std::string> stems;     // what was encoded again
  std::vector<std::string> problems;  // one line per matrix whose bytes differ
};

// Errors: failed_precondition when checkpoint or data are not those of the run, not_found / data_loss for records that are
// absent or broken, unimplemented when another kind of machine made the pack (its sums may be ordered differently), cancelled.
Result<RederiveReport> rederive(const RederiveOptions& options, Progress& progress, ThreadPool& pool);

}  // namespace espalier
