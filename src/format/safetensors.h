// The safetensors container: bytes in, named typed tensors out, and back. No model knowledge.
//
// Layout: u64 little-endian header length n, n bytes of JSON, data. Every rule of the format is checked before a pointer is
// made: header size (at most 1 GiB, inside the file), object of objects, known dtype, non-negative shape whose size fits 64 bits,
// begin <= end, shape x element size = byte range, ranges that cover the data exactly without gap or overlap, unique names,
// string-to-string __metadata__. Source: the safetensors format description (huggingface/safetensors, Apache-2.0).
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/file.h"
#include "base/status.h"
#include "tensor/view.h"

namespace espalier {

struct TensorEntry {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  uint64_t begin = 0;  // bytes from the start of the file, inclusive
  uint64_t end = 0;    // exclusive

  uint64_t size_bytes() const { return end - begin; }
};

struct SafetensorsHeader {
  std::vector<TensorEntry> entries;  // in order of `begin`
  std::map<std::string, std::string> metadata;
};

// Pure parse. `file_start` holds at least the header (the whole file when it is mapped); `file_size` is the size on disk.
// Errors: data_loss naming `what` (a path), the tensor, expected and found.
Result<SafetensorsHeader> parse_safetensors_header(std::span<const uint8_t> file_start, uint64_t file_size,
                                                   std::string_view what);

// A mapped file with its header. Threads: immutable; concurrent reads are fine.
class SafetensorsFile {
 public:
  static Result<SafetensorsFile> open(const std::filesystem::path& path);

  const std::vector<TensorEntry>& entries() const { return header_.entries; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  const std::filesystem::path& path() const { return file_.path(); }
  // nullptr when there is no such tensor.
  const TensorEntry* find(std::string_view name) const;
  // Valid while this object lives. Unaligned data is possible: the format does not promise alignment.
  ConstView view(const TensorEntry& entry) const;
  // Errors: not_found naming file and tensor.
  Result<ConstView> get(std::string_view name) const;

 private:
  SafetensorsFile(MappedFile file, SafetensorsHeader header);
  MappedFile file_;
  SafetensorsHeader header_;
  std::unordered_map<std::string_view, size_t> by_name_;
};

struct NamedView {
  std::string name;
  ConstView view;
};

// Writes a file whole or not at all. Data must be given in the order of `declare`d tensors, in one or several pieces each.
class SafetensorsWriter {
 public:
  struct Declaration {
    std::string name;
    DType dtype;
    Shape shape;
  };
  // Writes the header at once. Errors: invalid_argument (duplicate or reserved names), those of AtomicFile.
  static Result<SafetensorsWriter> create(const std::filesystem::path& path, const std::vector<Declaration>& tensors,
                                          const std::map<std::string, std::string>& metadata = {});
  // Appends data of the tensors in declaration order.
  Status write(std::span<const uint8_t> bytes);
  // Errors: internal when the bytes written are not those declared; those of AtomicFile.
  Status commit();

 private:
  SafetensorsWriter(AtomicFile file, uint64_t expected) : file_(std::move(file)), expected_(expected) {}
  AtomicFile file_;
  uint64_t expected_ = 0;
  uint64_t written_ = 0;
};

Status write_safetensors(const std::filesystem::path& path, const std::vector<NamedView>& tensors,
                         const std::map<std::string, std::string>& metadata = {});

}  // namespace espalier
