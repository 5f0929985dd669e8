// From a checkpoint and a calibration set to a finished pack: lock, quantize, describe, prove, publish under its final
// name.
//
// What is done is kept in `<out>.work` (quantize/work_folder.h) until the pack is assembled in `<out>.partial`; the final name
// appears when the last file is written and the pack has been read back and found to compute what the calibration stream
// computed. A run that fails, is stopped or is killed leaves nothing under the final name; one that was stopped or killed, or ran
// out of disk or memory, goes on with `resume` at the first matrix that is not kept. All files are functions of the inputs, the options and the program: no time, thread
// count, path or host is in them. Sequence of the stages quantize and pack.
#pragma once

#include <filesystem>
#include <string>

#include "base/progress.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "model/folder.h"
#include "stages/quantize/quantize.h"

namespace espalier {

struct MakePackOptions {
  std::string checkpoint;      // folder of the official checkpoint
  std::string engram_dir;      // another folder with the Engram shards; empty: none
  std::filesystem::path data;  // calibration set
  std::filesystem::path out;   // must not exist
  int64_t rows = 0;            // use at most so many rows, spread over the set; 0: all
  std::string tool;            // "espalier 0.1.0", for the records
  Layout layout = Layout::kExllamav3;
  std::filesystem::path library;  // width library to take matrices from and add to; empty: none
  bool resume = false;               // go on with what an interrupted run of the same recipe kept
  std::filesystem::path work_dir;    // another folder for the large scratch files; empty: beside the output
  std::string plan_sha256;  // of the plan file in quantize.plan; empty: none
  QuantizeOptions quantize;
};

struct MakePackReport {
  double bpw = 0;      // card definition
  uint64_t bytes = 0;  // of the whole folder
  int64_t matrices = 0;
  QuantizeReport details;
};

// Errors: failed_precondition (output exists, output = checkpoint, output inside it), not_found, data_loss (broken
// checkpoint or data set), invalid_argument (options), resource_exhausted (disk), cancelled; internal when the finished
// pack does not reproduce the stream's logits bit for bit.
Result<MakePackReport> make_pack(const MakePackOptions& options, Progress& progress, ThreadPool& pool);

}  // namespace espalier
