// The calibration rows behind one layer, in one file: everything a forward pass carries except the window rings, which no later
// layer reads.
//
// Layout: one row after another, then a JSON footer {schema, recipe, layer, rows, tokens, dtype, ids_sha256, begin of every row,
// sha256 of the rows}, its length and a magic. Read through a mapping: one row at a time is in memory. Internal to the stage.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "base/hash.h"
#include "base/status.h"
#include "model/forward.h"

namespace espalier {

struct CalibrationRow;

class StreamWriter {
 public:
  static Result<StreamWriter> create(const std::filesystem::path& path);
  // Errors: resource_exhausted when the disk is full.
  Status add(const CalibrationRow& row);
  // Returns the sha256 of the rows.
  Result<std::string> commit(int layer, std::string_view recipe);

 private:
  explicit StreamWriter(AtomicFile file) : file_(std::move(file)) {}
  AtomicFile file_;
  Sha256 digest_, ids_;
  std::vector<uint64_t> begin_ = {0};
  int64_t tokens_ = 0;
};

class StreamFile {
 public:
  // Errors: data_loss naming the path: another recipe or layer, damaged footer; with sha256 given, other bytes (reads it all).
  static Result<StreamFile> open(const std::filesystem::path& path, int layer, std::string_view recipe,
                                 const std::optional<std::string>& sha256);
  size_t size() const { return begin_.size() - 1; }
  // A copy of row i, in a new state of the network.
  Result<CalibrationRow> row(size_t i, const Config& config) const;

 private:
  explicit StreamFile(MappedFile file) : file_(std::move(file)) {}
  MappedFile file_;
  std::vector<uint64_t> begin_;
};

}  // namespace espalier
