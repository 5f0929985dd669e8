#include "bench/exl3_quality/cache.h"

#include <cstring>

#include "base/file.h"
#include "base/hash.h"

namespace espalier::quality {
namespace {

std::string header_of(std::string_view key, std::span<const uint8_t> bytes) {
  return "espalier-bench-cache-1\n" + std::string(key) + "\n" + sha256_hex(bytes) + "\n";
}

}  // namespace

bool read_cache(const std::filesystem::path& path, std::string_view key, std::span<uint8_t> bytes) {
  Result<MappedFile> file = MappedFile::open(path);
  if (!file.ok()) return false;
  const std::span<const uint8_t> all = file->bytes();
  if (all.size() < bytes.size()) return false;
  const std::span<const uint8_t> body = all.last(bytes.size());
  const std::string header = header_of(key, body);
  if (all.size() != header.size() + bytes.size() || std::memcmp(all.data(), header.data(), header.size()) != 0)
    return false;
  std::memcpy(bytes.data(), body.data(), bytes.size());
  return true;
}

Status write_cache(const std::filesystem::path& path, std::string_view key, std::span<const uint8_t> bytes) {
  ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::create(path));
  RETURN_IF_ERROR(file.write(header_of(key, bytes)));
  RETURN_IF_ERROR(file.write(bytes));
  return file.commit();
}

}  // namespace espalier::quality
