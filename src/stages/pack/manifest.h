// MANIFEST.sha256 read back and held against a folder. Lines are those of sha256sum: 64 hex digits, two spaces (or a space
// and '*'), a relative name. Names that leave the folder are refused. Threads: parse is pure; fuzz target pack_records_fuzz.cpp.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "base/progress.h"
#include "base/status.h"
#include "base/thread_pool.h"

namespace espalier {

struct ManifestEntry {
  std::string sha256;  // lower case
  std::string name;
};

// Errors: data_loss naming `what`, the line, expected and found; names that occur twice.
Result<std::vector<ManifestEntry>> parse_manifest(std::string_view text, std::string_view what);

// True for a relative path of plain names: no "..", no absolute path, no empty part.
bool is_inner_path(std::string_view name);

// Compares every file below `dir` with its manifest. One line per file that is missing, changed or not listed. Errors: those
// of reading and parsing the manifest; cancelled.
Result<std::vector<std::string>> check_manifest(const std::filesystem::path& dir, Progress& progress, ThreadPool& pool);

}  // namespace espalier
