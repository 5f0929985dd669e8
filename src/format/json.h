// JSON in and out, over nlohmann's ordered_json. Include <nlohmann/json.hpp> in the .cpp that looks inside a value.
//
// Reading is strict because the bytes come from outside: duplicate keys, nesting deeper than 64, NaN or infinite numbers, bytes
// that are not UTF-8 and anything after the document are refused, and the message names the source and the byte.
// Threads: pure.
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "base/status.h"

namespace espalier {

using Json = nlohmann::ordered_json;

// `what` names the source in messages ("config.json", "request body"). Errors: data_loss.
Result<Json> parse_json(std::string_view text, std::string_view what);

// Reads and parses a file. Errors: not_found, data_loss; messages carry the path.
Result<Json> read_json_file(const std::filesystem::path& path, uint64_t limit_bytes = uint64_t{1} << 30);

// Serialises; indent < 0 gives one line. Bytes that are not UTF-8 become U+FFFD.
std::string dump_json(const Json& value, int indent = -1);

}  // namespace espalier
