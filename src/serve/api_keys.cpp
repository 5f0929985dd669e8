#include "serve/api_keys.h"

#include <utility>

#include "base/file.h"
#include "base/hash.h"

namespace espalier {

Result<ApiKeys> ApiKeys::load(const std::filesystem::path& path) {
  Result<std::string> text = read_text_file(path, 1 << 20);
  if (!text.ok()) return std::move(text).error().with_context("API keys");
  ApiKeys keys;
  size_t at = 0;
  while (at < text->size()) {
    const size_t end = std::min(text->find('\n', at), text->size());
    std::string_view line = std::string_view(*text).substr(at, end - at);
    at = end + 1;
    while (!line.empty() && (line.back() == '\r' || line.back() == ' ' || line.back() == '\t')) line.remove_suffix(1);
    while (!line.empty() && (line.front() == ' ' || line.front() == '\t')) line.remove_prefix(1);
    if (line.empty() || line.front() == '#') continue;
    keys.digests_.push_back(sha256_hex(line));
  }
  if (!keys.required()) {
    return data_loss("API keys: " + path.string() + ": expected one key a line, found none; a server without keys is started by "
                     "leaving --api-key-file out");
  }
  return keys;
}

bool ApiKeys::accepts(std::string_view key) const {
  const std::string digest = sha256_hex(key);
  bool accepted = false;
  for (const std::string& known : digests_) {
    unsigned char difference = 0;
    for (size_t i = 0; i < known.size(); ++i) difference |= static_cast<unsigned char>(known[i] ^ digest[i]);
    accepted |= difference == 0;
  }
  return accepted;
}

}  // namespace espalier
