// From one pack layout to another: the same tensors in other files. No byte of a tensor changes; files whose set of tensors
// stays the same are hard-linked where the file system can, else copied.
//
// The new folder gets the description of its layout, the side files, the records of the source (source.lock.json, run.json,
// matrices.jsonl, reproduce.md), convert.json with the way it came, and a manifest. Source: docs/formats/pack.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "base/progress.h"
#include "base/status.h"
#include "model/config.h"
#include "model/folder.h"

namespace espalier {

struct ConvertOptions {
  std::filesystem::path pack;
  std::filesystem::path out;         // must not exist
  std::filesystem::path engram_dir;  // another folder with the Engram shards; empty: none
  // The checkpoint that the pack was made from; gives the image router biases (`ffn.gate.bias_vl`) that the pack lacks,
  // after its `ffn.gate.bias` proved to be the pack's. Empty: what is absent stays absent.
  std::filesystem::path checkpoint;
  Layout layout = Layout::kExllamav3;  // one of the three
  bool leave_engram_tables = false;    // the tables stay where they are and are named with --engram
  bool copy_files = false;             // no hard links
  std::string tool;                    // "espalier 0.1.0"
};

struct ConvertReport {
  Layout from = Layout::kExllamav3;
  double bpw = 0;
  uint64_t bytes = 0;  // of the whole folder
  int64_t tensors = 0;
  int64_t matrices = 0;
  int64_t linked_files = 0;
  int64_t written_files = 0;
  std::vector<std::string> notes;  // what was left out or added, and what readers of the layout may not take
};

// Errors: failed_precondition (output exists or is the input; a checkpoint of another snapshot; nothing quantized here),
// not_found, data_loss (incomplete or damaged pack, side files that contradict the shards), resource_exhausted, cancelled.
Result<ConvertReport> convert_pack(const ConvertOptions& options, Progress& progress);

// Regroups the shards of a folder that is still being made (`dir` has no index yet) into the files of another layout.
// Needs room for both. Errors: those of reading and writing.
Status regroup_shards(const std::filesystem::path& dir, Layout layout, const Config& config);

}  // namespace espalier
