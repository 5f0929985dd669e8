// Turns a folder of finished shards into a pack: index, configuration, side files, manifest.
//
// Everything written here is derived from the shards' headers (layout.h, describe.h) and from the source checkpoint's
// folder, so the description cannot drift from the bytes. Layouts: docs/formats/pack.md. Source: packs.md 1; exl3.md 6.7.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "base/progress.h"
#include "base/status.h"
#include "stages/pack/describe.h"

namespace espalier {

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

// The same for tensors that may not exist yet, grouped into files.
Result<PackSummary> summarise_tensors(const std::vector<SafetensorsWriter::Declaration>& tensors,
                                      const std::vector<PackFile>& files);

// Writes the description of describe_pack into `dir`, from the headers of its shards.
// source_dir: the checkpoint (its config.json is the base). facts: producer, calibration and the checkpoint's own block; the
// rest is measured. Errors: not_found, data_loss, those of writing.
Status write_pack_description(const std::filesystem::path& dir, const std::filesystem::path& source_dir, Layout layout,
                              const PackFacts& facts);

// Copies one file, whole or not at all.
Status copy_whole_file(const std::filesystem::path& from, const std::filesystem::path& to);

// Relative names, sorted, of what belongs to every pack of a checkpoint: tokenizer, chat template, generation settings,
// licences and `encoding/`.
Result<std::vector<std::string>> list_side_files(const std::filesystem::path& source_dir);
// Copies them unchanged. Returns the names.
Result<std::vector<std::string>> copy_side_files(const std::filesystem::path& source_dir,
                                                 const std::filesystem::path& dir);

// Every regular file below `dir` (links to files included, linked folders not entered) as sorted relative names.
Result<std::vector<std::string>> list_files(const std::filesystem::path& dir, bool recursive);

// A name for a new folder: not empty, free, neither `source` (a "checkpoint", a "pack") nor inside it. Errors:
// failed_precondition, invalid_argument.
Status check_new_folder(const std::filesystem::path& out, const std::filesystem::path& source,
                        const std::string& source_is);

inline constexpr const char* kManifestFile = "MANIFEST.sha256";

// Writes MANIFEST.sha256 over every regular file below `dir` except itself: sorted by name, LF, `sha256sum -c` reads
// it. Returns the sum of the files' sizes, manifest included.
Result<uint64_t> write_manifest(const std::filesystem::path& dir, Progress& progress);

}  // namespace espalier
