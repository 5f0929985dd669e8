#include "serve/fields.h"

#include <cstdio>
#include <nlohmann/json.hpp>

namespace espalier {
namespace {

std::string number_text(double x) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%g", x);
  return buffer;
}

}  // namespace

std::string json_kind(const Json& value) {
  switch (value.type()) {
    case Json::value_t::null: return "null";
    case Json::value_t::boolean: return "a boolean";
    case Json::value_t::number_integer:
    case Json::value_t::number_unsigned: return "an integer";
    case Json::value_t::number_float: return "a number";
    case Json::value_t::string: return "a string";
    case Json::value_t::array: return "an array";
    case Json::value_t::object: return "an object";
    default: return "an unknown value";
  }
}

const Json* Fields::find(std::string_view name) const {
  const auto it = object_.find(name);
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

std::optional<bool> Fields::boolean(std::string_view name) {
  const Json* value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) {
    fail(bad_field(std::string(name), std::string(name) + ": expected true or false, found " + json_kind(*value)));
    return std::nullopt;
  }
  return value->get<bool>();
}

std::optional<int64_t> Fields::integer(std::string_view name, int64_t low, int64_t high) {
  const Json* value = find(name);
  if (value == nullptr) return std::nullopt;
  const std::string range = "expected an integer from " + std::to_string(low) + " to " + std::to_string(high);
  if (!value->is_number_integer()) {
    fail(bad_field(std::string(name), std::string(name) + ": " + range + ", found " + json_kind(*value)));
    return std::nullopt;
  }
  const bool too_large = value->is_number_unsigned() && value->get<uint64_t>() > static_cast<uint64_t>(INT64_MAX);
  if (too_large || value->get<int64_t>() < low || value->get<int64_t>() > high) {
    fail(bad_field(std::string(name), std::string(name) + ": " + range + ", found " + dump_json(*value)));
    return std::nullopt;
  }
  return value->get<int64_t>();
}

std::optional<double> Fields::number(std::string_view name, double low, double high, bool low_open) {
  const Json* value = find(name);
  if (value == nullptr) return std::nullopt;
  const std::string range = "expected a number " + std::string(low_open ? "above " : "from ") + number_text(low) +
                            (low_open ? " and at most " : " to ") + number_text(high);
  if (!value->is_number()) {
    fail(bad_field(std::string(name), std::string(name) + ": " + range + ", found " + json_kind(*value)));
    return std::nullopt;
  }
  const double x = value->get<double>();
  if (!(x >= low && x <= high) || (low_open && x == low)) {
    fail(bad_field(std::string(name), std::string(name) + ": " + range + ", found " + dump_json(*value)));
    return std::nullopt;
  }
  return x;
}

std::optional<std::string> Fields::text(std::string_view name) {
  const Json* value = find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) {
    fail(bad_field(std::string(name), std::string(name) + ": expected a string, found " + json_kind(*value)));
    return std::nullopt;
  }
  return value->get<std::string>();
}

}  // namespace espalier
