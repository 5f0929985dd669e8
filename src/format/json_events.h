// JSON that is too long for a tree of all its values: parts of it handed over as they are read. The rules are those of json.h.
// Threads: pure.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

#include "base/status.h"
#include "format/json.h"

namespace espalier {

// A long object of strings directly in the root (a weight map), handed over entry by entry and left out of the result, where it
// stands as an empty object. The receiver sees to repeated names.
struct JsonTable {
  std::string key;
  std::string item;      // what an entry is, for messages: "tensor"
  std::string expected;  // what its value is; anything but a string is refused
  std::function<void(const std::string& name, const std::string& value)> entry;
};

// Errors: data_loss naming `what`; some entries may have been handed over by then.
Result<Json> parse_json_with_table(std::string_view text, std::string_view what, const JsonTable& table);

// Text of a syntax error at a byte, from what the parser said about it.
std::string json_syntax_error(std::size_t position, std::string_view detail);

}  // namespace espalier
