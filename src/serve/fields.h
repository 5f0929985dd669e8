// Reads typed fields of a request's JSON object. null counts as absent, booleans are not numbers, numeric strings are refused.
// The first problem is kept in error(); later reads are harmless.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "format/json.h"
#include "serve/api_error.h"

namespace espalier {

class Fields {
 public:
  // `object` must be a JSON object and outlive the reader.
  explicit Fields(const Json& object) : object_(object) {}

  // The value, or null when the field is absent or null.
  const Json* find(std::string_view name) const;

  std::optional<bool> boolean(std::string_view name);
  std::optional<int64_t> integer(std::string_view name, int64_t low, int64_t high);
  // low_open: the low end itself is not allowed.
  std::optional<double> number(std::string_view name, double low, double high, bool low_open = false);
  std::optional<std::string> text(std::string_view name);

  void fail(ApiError error) {
    if (!error_) error_ = std::move(error);
  }
  const std::optional<ApiError>& error() const { return error_; }

 private:
  const Json& object_;
  std::optional<ApiError> error_;
};

// "a string", "an integer", … for messages.
std::string json_kind(const Json& value);

}  // namespace espalier
