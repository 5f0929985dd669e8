// Files: memory-mapped reading, and writing that is whole or not at all.
//
// AtomicFile writes to `<path>.partial-<pid>` in the same folder and renames after flush; when it is dropped without
// commit() the partial file is removed. AtomicDirectory works in `<path>.partial`, which carries a marker file and a lock: two
// runs cannot write the same output, and a folder that is not a left-over of ours is never removed.
#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace espalier {

// Read-only mapping of a whole regular file; empty files map to an empty span.
// Threads: immutable after open; concurrent reads are fine.
class MappedFile {
 public:
  // Errors: not_found (missing, not a regular file), data_loss (cannot map), resource_exhausted (no memory or too many open files),
  // with path and cause.
  static Result<MappedFile> open(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const uint8_t> bytes() const { return {data_, size_}; }
  const std::filesystem::path& path() const { return path_; }

 private:
  MappedFile() = default;
  const uint8_t* data_ = nullptr;
  size_t size_ = 0;
  std::filesystem::path path_;
};

// Whole file as a string. `limit_bytes`: larger files are refused (data_loss) before reading.
Result<std::string> read_text_file(const std::filesystem::path& path, uint64_t limit_bytes = uint64_t{1} << 30);

// Says before any work is done whether an output file can be written: its folder exists and is writable, and the name is free
// or a regular file. A device, a folder or a symbolic link is refused, because a rename would replace it.
Status check_output_file(const std::filesystem::path& path);

class AtomicFile {
 public:
  // Errors: those of check_output_file; resource_exhausted with path and cause.
  static Result<AtomicFile> create(const std::filesystem::path& path);
  ~AtomicFile();
  AtomicFile(AtomicFile&& other) noexcept;
  AtomicFile& operator=(AtomicFile&& other) noexcept;

  // Errors: resource_exhausted (disk full) or unavailable, naming path, bytes wanted and cause.
  Status write(std::span<const uint8_t> bytes);
  Status write(std::string_view text);
  // Flushes to disk and renames to the final name. After an error the final name is untouched.
  Status commit();

 private:
  AtomicFile() = default;
  void discard();
  std::FILE* file_ = nullptr;
  std::filesystem::path path_;
  std::filesystem::path partial_;
};

// write_text_file: AtomicFile in one call.
Status write_text_file(const std::filesystem::path& path, std::string_view text);

// A folder of outputs that appears under its final name only when complete. Work in `partial_path()`.
class AtomicDirectory {
 public:
  // `path` must not exist (failed_precondition names it). A left-over `<path>.partial` of an earlier run is kept when
  // `reuse_partial` (resume), else replaced; one that another run holds, or that we did not make, is refused.
  static Result<AtomicDirectory> create(const std::filesystem::path& path, bool reuse_partial = false);

  ~AtomicDirectory();
  AtomicDirectory(AtomicDirectory&& other) noexcept;
  AtomicDirectory& operator=(AtomicDirectory&& other) noexcept;

  // Name of the marker inside the partial folder; commit() removes it, writers of manifests leave it out.
  static constexpr const char* kMarker = ".espalier-partial";

  const std::filesystem::path& partial_path() const { return partial_; }
  // Renames the partial folder to the final name; errors leave it in place.
  Status commit();
  // Removes the partial folder and everything in it, and the parents that create() had to make as far as they are empty.
  void discard();

 private:
  AtomicDirectory() = default;
  std::filesystem::path path_;
  std::filesystem::path partial_;
  std::vector<std::filesystem::path> made_parents_;  // innermost first
  int lock_ = -1;  // descriptor of the marker, locked for as long as this object lives
};

}  // namespace espalier
