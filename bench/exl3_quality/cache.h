// Files of the work folder: a key that says what the bytes depend on, then the bytes. A file of another key or size
// does not exist.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"

namespace espalier::quality {

// Fills `bytes` and returns true when the file is there, whole and of this key.
bool read_cache(const std::filesystem::path& path, std::string_view key, std::span<uint8_t> bytes);
// Whole or not at all.
Status write_cache(const std::filesystem::path& path, std::string_view key, std::span<const uint8_t> bytes);

}  // namespace espalier::quality
