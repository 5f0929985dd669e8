// All tensors of a model folder by name, over one or many safetensors files.
//
// With model.safetensors.index.json its weight map decides (every file it names must exist in one of the folders, every mapped
// tensor must be in its file, a tensor that a file holds but the map gives to another file is skipped); without it every
// *.safetensors file of the folder, sorted by name. A name that occurs twice is refused, and so is a file name in the map that
// leaves the folder. `extra_dirs` are searched for files that the first folder lacks (Engram shards kept elsewhere), and a
// tensor that the folder does not have at all may be borrowed from a model folder among them (IndexOptions::may_borrow).
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "format/safetensors.h"

namespace espalier {

class TensorIndex;

struct IndexOptions {
  std::vector<std::filesystem::path> extra_dirs;
  // Files of the first folder that are read besides those of the map, when they are there.
  std::vector<std::string> side_files;
  // A file of the map that is nowhere is noted (missing_files) and its tensors are absent, instead of an error.
  bool allow_missing_files = false;
  // Which tensors may come from files of extra_dirs that the map does not name. Asked with a name that is absent so far and
  // with the index as it stands.
  std::function<bool(const TensorIndex&, const std::string& name)> may_borrow;
};

// Threads: immutable after open; concurrent reads are fine. Views live as long as the index (files stay mapped).
class TensorIndex {
 public:
  // Errors: not_found (no folder, no weights, missing shard), data_loss (damaged shard or index), with file and tensor.
  static Result<TensorIndex> open(const std::filesystem::path& dir, const IndexOptions& options);
  static Result<TensorIndex> open(const std::filesystem::path& dir, const std::vector<std::filesystem::path>& extra_dirs = {});

  bool contains(std::string_view name) const { return by_name_.count(name) != 0; }
  std::optional<ConstView> find(std::string_view name) const;
  // Its line of the header, or nullptr; valid while this object lives, and one object per tensor.
  const TensorEntry* entry(std::string_view name) const;
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
  // The opened files with their headers, in the order of files().
  const SafetensorsFile& file(size_t i) const { return *files_[i]; }

  // Files of the map that are nowhere, with the number of tensors that the map puts there.
  const std::vector<std::pair<std::string, size_t>>& missing_files() const { return missing_files_; }
  // "file: tensor" of tensors in opened files of the first folder that the map does not mention.
  const std::vector<std::string>& unmapped() const { return unmapped_; }
  // metadata.total_size of the map, when it is there and a whole number.
  std::optional<uint64_t> declared_bytes() const { return declared_bytes_; }
  // Data of the tensors that the map names; without a map, of all.
  uint64_t mapped_bytes() const { return mapped_bytes_; }

 private:
  Status add_file(const std::filesystem::path& path);
  Status add_tensor(size_t file, size_t entry);
  Status borrow_from(const std::filesystem::path& dir, const IndexOptions& options);
  struct Place {
    size_t file;
    size_t entry;
  };
  std::filesystem::path dir_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::vector<std::filesystem::path> paths_;
  std::unordered_map<std::string_view, Place> by_name_;  // names live in the files' headers
  std::vector<std::string> names_;
  uint64_t total_bytes_ = 0;
  std::vector<std::pair<std::string, size_t>> missing_files_;
  std::vector<std::string> unmapped_;
  std::optional<uint64_t> declared_bytes_;
  uint64_t mapped_bytes_ = 0;
};

}  // namespace espalier
