// Turns a folder of finished shards into a pack in the exllamav3 layout: index, configuration, side files, manifest.
//
// Shards are named `model-XXXXX-of-YYYYY.safetensors`; everything written here is derived from their headers and from
// the source checkpoint's folder, so the description cannot drift from the bytes. Layout: docs/formats/pack.md. Source:
// exllamav3's compiler output as described in the pack specification 1.2 and the EXL3 specification 6.7.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "base/progress.h"
#include "base/status.h"

namespace espalier {

// What the headers cannot tell.
struct PackFacts {
  std::string producer;  // "espalier 0.1.0"
  std::string codebook;  // mul1, mcg or 3inst
  double bits = 0;       // card definition, see PackSummary::bpw
  double head_bits = 0;  // 0: the head is native
  double mtp_bits = 0;   // 0: no drafter, or native
  int64_t calibration_rows = 0;
  int64_t calibration_cols = 0;  // longest row
};

// What is in the shards of a folder, from their headers only.
struct PackSummary {
  // Trellis bits over the weights of layers.* in trellis form (routed and shared experts, attention, compressor,
  // indexer, Engram projection); head, drafter, native tensors and scale vectors do not count.
  double bpw = 0;
  int64_t matrices = 0;  // EXL3 matrices, head and drafter included
  int64_t tensors = 0;
  uint64_t tensor_bytes = 0;  // all tensor data
};

// Errors: those of SafetensorsFile::open; data_loss when a trellis has an impossible shape or the folder has no shards.
Result<PackSummary> summarise_shards(const std::filesystem::path& dir);

// Writes model.safetensors.index.json, config.json and quantization_config.json into `dir`.
// source_dir: the checkpoint (its config.json is the base). Errors: not_found, data_loss, those of writing.
Status write_pack_description(const std::filesystem::path& dir, const std::filesystem::path& source_dir,
                              const PackFacts& facts);

// Copies tokenizer, chat template, generation settings, licences and `encoding/` unchanged. Returns the relative names,
// sorted.
Result<std::vector<std::string>> copy_side_files(const std::filesystem::path& source_dir,
                                                 const std::filesystem::path& dir);

// Writes MANIFEST.sha256 over every regular file below `dir` except itself: sorted by name, LF, `sha256sum -c` reads
// it. Returns the sum of the files' sizes, manifest included.
Result<uint64_t> write_manifest(const std::filesystem::path& dir, Progress& progress);

}  // namespace espalier
