// From a checkpoint and a data set to a statistics folder: what routing does to the experts of the native network, and
// whether the set covers them.
//
// Rows run layer by layer, in groups whose state fits the memory limit; every group reads the weights once. The result
// does not depend on the groups, on threads or on how weights are kept. The drafter's stages see real draft calls on the
// taps of the same rows. A sequence in which a token is not finite is counted, its token left out; more than 10 % of
// such sequences end the run. Puts the stages calibrate and quantize (streams, Hessians) together. Source: quality.md
// 1.2, 1.3, 2.3; docs/formats/sensitivity.md, docs/calibration.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "base/progress.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "model/dataset.h"
#include "model/expert_pruning.h"
#include "model/numerics.h"
#include "model/routing_statistics.h"
#include "stages/calibrate/coverage_audit.h"

namespace espalier {

inline constexpr char kCalibrationSchema[] = "espalier-calibration-1";
inline constexpr char kCalibrationFile[] = "calibration.json";

struct CalibrateOptions {
  std::string checkpoint;      // folder
  std::string engram_dir;      // another folder with the Engram shards; empty: none
  std::filesystem::path data;  // data set
  std::filesystem::path out;   // folder to make
  int64_t rows = 0;            // at most so many, spread over the set; 0: all
  Numerics numerics = Numerics::kKvq;
  std::optional<ExpertPruning> pruning;  // also count reads as served
  int64_t draft_stride = 8;              // one draft call per so many positions
  uint64_t memory_limit = 0;             // bytes; 0: 80 % of what is available
  int export_layer = -1;                 // write this layer's inputs and Hessians into export_file (calibrate_export.h)
  std::filesystem::path export_file;
  double routing_exponent = 2;  // of the exported Hessians
  std::string tool;             // "espalier 0.1.0"
};

// What a run will take. Mapped checkpoint bytes are not counted: the system can drop them.
struct CalibrateEstimate {
  int64_t rows = 0, tokens = 0;
  uint64_t limit_bytes = 0;      // as given or as found; 0: unknown
  uint64_t fixed_bytes = 0;      // program, data set, weights of one block, work space of the longest row
  uint64_t state_bytes = 0;      // all rows at once
  uint64_t peak_bytes = 0;       // with the groups below
  uint64_t disk_bytes = 0;       // of the statistics folder
  bool unpacked_experts = false; // experts as fp32 while their layer runs, else as stored
  std::vector<size_t> group_ends;  // rows [previous end, end) run together
};

// Errors: those of the readers; resource_exhausted naming what is needed and what there is, when the longest row does not
// fit or the disk is too small.
Result<CalibrateEstimate> estimate_calibration(const CalibrateOptions& options);

struct CalibrateReport {
  CalibrateEstimate estimate;
  RoutingStatistics statistics;
  CoverageAudit coverage;
  int64_t rows = 0;
  int64_t tokens = 0;
  int64_t draft_calls = 0;
  int64_t dropped_tokens = 0;   // summed over layers
  int64_t broken_sequences = 0;
};

// Errors: those of estimate_calibration; failed_precondition when `out` exists or lies in the checkpoint; data_loss for
// activations that are not finite; cancelled. Nothing is left under `out` then.
Result<CalibrateReport> calibrate(const CalibrateOptions& options, Progress& progress, ThreadPool& pool);

}  // namespace espalier
