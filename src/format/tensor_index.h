// All tensors of a model folder by name, over one or many safetensors files.
//
// With model.safetensors.index.json its weight map decides (every file it names must exist in one of the folders, every mapped
// tensor must be in its file, a tensor that a file holds but the map gives to another file is skipped); without it every
// *.safetensors file of the folder, sorted by name. A name that occurs twice is refused, and so is a file name in the map that
// leaves the folder. `extra_dirs` are searched for files that the first folder lacks (Engram shards kept elsewhere).
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "format/safetensors.h"

namespace espalier {

// Threads: immutable after open; concurrent reads are fine. Views live as long as the index (files stay mapped).
class TensorIndex {
 public:
  // Errors: not_found (no folder, no weights, missing shard), data_loss (damaged shard or index), with file and tensor.
  static Result<TensorIndex> open(const std::filesystem::path& dir, const std::vector<std::filesystem::path>& extra_dirs = {});

  bool contains(std::string_view name) const { return by_name_.count(std::string(name)) != 0; }
  std::optional<ConstView> find(std::string_view name) const;
  // Checks dtype and shape. Errors: not_found / data_loss: folder or file, tensor, expected, found, what to try.
  Result<ConstView> get(std::string_view name, DType dtype, const Shape& shape) const;
  Result<ConstView> get(std::string_view name) const;
  // File that holds the tensor; empty when there is none.
  std::filesystem::path file_of(std::string_view name) const;

  // Sorted.
  const std::vector<std::string>& names() const { return names_; }
  const std::vector<std::filesystem::path>& files() const { return paths_; }
  const std::filesystem::path& dir() const { return dir_; }
  uint64_t total_bytes() const { return total_bytes_; }

 private:
  struct Place {
    size_t file;
    size_t entry;
  };
  std::filesystem::path dir_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::vector<std::filesystem::path> paths_;
  std::unordered_map<std::string, Place> by_name_;
  std::vector<std::string> names_;
  uint64_t total_bytes_ = 0;
};

}  // namespace espalier
