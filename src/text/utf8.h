// UTF-8 in and out, one code point at a time, and the replacement of ill-formed bytes by U+FFFD.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace espalier {

inline constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

struct Utf8Unit {
  uint32_t code_point = 0;
  uint32_t size = 0;     // bytes taken, at least 1
  bool valid = false;    // false: `size` bytes are a maximal ill-formed part (one U+FFFD stands for them)
  bool cut_off = false;  // not valid, but bytes after the end of the text could complete it
};

// The unit that starts at text[at]; at < text.size().
Utf8Unit next_utf8(std::string_view text, size_t at);

bool is_valid_utf8(std::string_view text);

// Ill-formed parts replaced by U+FFFD, one each (Unicode 15, section 3.9, "maximal subparts"; the same in Rust and
// Python).
std::string to_valid_utf8(std::string_view bytes);

void append_utf8(uint32_t code_point, std::string& out);

}  // namespace espalier
