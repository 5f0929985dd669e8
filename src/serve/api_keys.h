// The keys that clients may present. Only SHA-256 digests are kept; comparison takes the same time whichever key is right.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace espalier {

class ApiKeys {
 public:
  // No keys: everybody may call.
  ApiKeys() = default;
  // One key a line; blank lines and lines that start with '#' are skipped.
  // Errors: not_found; data_loss when the file holds no key, naming it. Never repeats a key in a message.
  static Result<ApiKeys> load(const std::filesystem::path& path);

  bool required() const { return !digests_.empty(); }
  bool accepts(std::string_view key) const;

 private:
  std::vector<std::string> digests_;  // 64 hex digits each
};

}  // namespace espalier
