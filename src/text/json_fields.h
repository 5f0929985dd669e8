// Reading fields of a JSON object with messages that say where, what was expected and what was found.
#pragma once

#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "base/status.h"
#include "format/json.h"

namespace espalier {

// "an object", "the string "abc"", "null", … for messages; long values are cut.
std::string describe_json(const Json& value);

// data_loss unless `value` is an object with no keys besides `known`. `where` is the path in messages.
Status expect_object(const Json& value, const std::string& where, std::initializer_list<std::string_view> known);

// The member, or null when it is absent or JSON null. `object` is an object.
const Json* find_member(const Json& object, std::string_view key);

Result<std::string> string_member(const Json& object, std::string_view key, const std::string& where);
// Absent or null gives `otherwise`.
Result<bool> bool_member(const Json& object, std::string_view key, bool otherwise, const std::string& where);

}  // namespace espalier
