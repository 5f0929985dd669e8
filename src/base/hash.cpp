#include "base/hash.h"

#include <openssl/evp.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <vector>

namespace espalier {

struct Sha256::Impl {
  EVP_MD_CTX* context = EVP_MD_CTX_new();
  ~Impl() { EVP_MD_CTX_free(context); }
};

Sha256::Sha256() : impl_(std::make_unique<Impl>()) {
  CHECK(impl_->context != nullptr && EVP_DigestInit_ex(impl_->context, EVP_sha256(), nullptr) == 1)
      << "SHA-256 could not be set up";
}
Sha256::~Sha256() = default;
Sha256::Sha256(Sha256&&) noexcept = default;
Sha256& Sha256::operator=(Sha256&&) noexcept = default;

void Sha256::update(std::span<const uint8_t> bytes) {
  CHECK(EVP_DigestUpdate(impl_->context, bytes.data(), bytes.size()) == 1) << "SHA-256 update failed";
}

void Sha256::update(std::string_view text) {
  update(std::span(reinterpret_cast<const uint8_t*>(text.data()), text.size()));
}

std::string Sha256::finish_hex() {
  std::array<unsigned char, 32> digest{};
  unsigned int size = 0;
  CHECK(EVP_DigestFinal_ex(impl_->context, digest.data(), &size) == 1 && size == digest.size()) << "SHA-256 failed";
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out;
  out.reserve(64);
  for (unsigned char b : digest) {
    out.push_back(kHex[b >> 4]);
    out.push_back(kHex[b & 15]);
  }
  return out;
}

std::string sha256_hex(std::span<const uint8_t> bytes) {
  Sha256 h;
  h.update(bytes);
  return h.finish_hex();
}

std::string sha256_hex(std::string_view text) {
  Sha256 h;
  h.update(text);
  return h.finish_hex();
}

Result<std::string> sha256_file_hex(const std::filesystem::path& path) {
  std::error_code ec;
  if (std::filesystem::exists(path, ec) && !std::filesystem::is_regular_file(path, ec)) {  // a pipe would block
    return data_loss("'" + path.string() + "' is not a regular file");
  }
  std::FILE* f = std::fopen(path.c_str(), "rb");
  if (f == nullptr) return not_found("cannot open '" + path.string() + "': " + std::strerror(errno));
  Sha256 h;
  std::vector<uint8_t> buffer(1 << 20);
  size_t n = 0;
  while ((n = std::fread(buffer.data(), 1, buffer.size(), f)) > 0) h.update(std::span(buffer.data(), n));
  const bool failed = std::ferror(f) != 0;
  std::fclose(f);
  if (failed) return data_loss("cannot read '" + path.string() + "'");
  return h.finish_hex();
}

}  // namespace espalier
