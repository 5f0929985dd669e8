// What identifies inputs in results: hashes of files, and an identity for a whole model folder.
//
// Nothing here names a host, a user or an absolute path, so records can be published. Source: quality specification
// section 7.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "base/progress.h"
#include "base/status.h"

namespace espalier {

struct FileRecord {
  std::string name;  // relative to the folder
  uint64_t size_bytes = 0;
  std::string sha256;
  std::string header_sha256;  // safetensors files: of the header bytes; else empty
};

// Hashes config.json, the index, the tokenizer and every *.safetensors of a model folder, sorted by name.
// Errors: not_found, data_loss, cancelled.
Result<std::vector<FileRecord>> lock_files(const std::filesystem::path& dir, Progress& progress);

// The same files with their sizes, and digests of zeros: what lock_files would name, without reading them.
Result<std::vector<FileRecord>> lock_sizes(const std::filesystem::path& dir);

// {"schema": "espalier-source-lock-1", "files": [...]}
std::string source_lock_json(const std::vector<FileRecord>& files);

// Reads source.lock.json back. Errors: data_loss naming `what`, the entry, expected and found; names that are no plain file
// names. Threads: pure; fuzz target pack_records_fuzz.cpp.
Result<std::vector<FileRecord>> parse_source_lock(std::string_view json_text, std::string_view what);

// Holds a checkpoint's folder against a lock: one line per file that is missing, has another size, header or digest, and per
// model file that the lock does not name. engram_dir: another folder with some of the files; empty: none. Errors: cancelled.
Result<std::vector<std::string>> check_source_lock(const std::filesystem::path& dir,
                                                   const std::filesystem::path& engram_dir,
                                                   const std::vector<FileRecord>& lock, Progress& progress);

// The same from sizes and headers alone: milliseconds, and enough to tell checkpoints apart.
Result<std::vector<std::string>> check_source_headers(const std::filesystem::path& dir,
                                                      const std::filesystem::path& engram_dir,
                                                      const std::vector<FileRecord>& lock);

// Identity of a model folder from headers only: sha256 over name, size and header bytes of every *.safetensors file and
// over config.json. Changes with any requantization (digests of shapes, names, sizes), costs milliseconds.
Result<std::string> model_identity(const std::filesystem::path& dir);

}  // namespace espalier
