#include "text/json_fields.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace espalier {

std::string describe_json(const Json& value) {
  switch (value.type()) {
    case Json::value_t::object:
      return "an object";
    case Json::value_t::array:
      return "an array";
    case Json::value_t::null:
      return "null";
    default:
      break;
  }
  std::string text = dump_json(value);
  if (text.size() > 60) text = dump_json(Json(text.substr(0, 57) + "…"));
  return text;
}

Status expect_object(const Json& value, const std::string& where, std::initializer_list<std::string_view> known) {
  if (!value.is_object()) return data_loss(where + ": expected an object, found " + describe_json(value));
  for (const auto& [key, unused] : value.items()) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      return unimplemented(where + ": the key '" + key.substr(0, 60) +
                           "' is not known, so the file cannot be read faithfully");
    }
  }
  return ok_status();
}

const Json* find_member(const Json& object, std::string_view key) {
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

Result<std::string> string_member(const Json& object, std::string_view key, const std::string& where) {
  const Json* member = find_member(object, key);
  if (member == nullptr || !member->is_string()) {
    return data_loss(where + "." + std::string(key) + ": expected a string, found " +
                     (member == nullptr ? "nothing" : describe_json(*member)));
  }
  return member->get<std::string>();
}

Result<bool> bool_member(const Json& object, std::string_view key, bool otherwise, const std::string& where) {
  const Json* member = find_member(object, key);
  if (member == nullptr) return otherwise;
  if (!member->is_boolean()) {
    return data_loss(where + "." + std::string(key) + ": expected true or false, found " + describe_json(*member));
  }
  return member->get<bool>();
}

}  // namespace espalier
