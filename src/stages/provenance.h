// What identifies inputs in results: hashes of files, and an identity for a whole model folder.
//
// Nothing here names a host, a user or an absolute path, so records can be published. Source: quality specification
// section 7.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
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

// {"schema": "espalier-source-lock-1", "files": [...]}
std::string source_lock_json(const std::vector<FileRecord>& files);

// Identity of a model folder from headers only: sha256 over name, size and header bytes of every *.safetensors file and
// over config.json. Changes with any requantization (digests of shapes, names, sizes), costs milliseconds.
Result<std::string> model_identity(const std::filesystem::path& dir);

}  // namespace espalier
