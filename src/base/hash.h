// SHA-256 for published digests (manifests, data sets, provenance). Source: FIPS 180-4, by OpenSSL's libcrypto.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"

namespace espalier {

// Streaming SHA-256. Threads: one hasher per thread.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(Sha256&&) noexcept;
  Sha256& operator=(Sha256&&) noexcept;

  void update(std::span<const uint8_t> bytes);
  void update(std::string_view text);
  // 64 lower-case hex digits; the hasher must not be used afterwards.
  std::string finish_hex();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

std::string sha256_hex(std::span<const uint8_t> bytes);
std::string sha256_hex(std::string_view text);
// Errors: not_found / data_loss with the path when the file cannot be read.
Result<std::string> sha256_file_hex(const std::filesystem::path& path);

}  // namespace espalier
