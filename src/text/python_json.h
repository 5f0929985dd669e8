// JSON as Python's json.dumps(value, ensure_ascii=False) writes it: ", " and ": ", insertion order, shortest float
// repr.
//
// Prompts hold tool schemas and arguments in this form, byte for byte as the reference encoder. Source: serving.md 1.5.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "format/json.h"

namespace espalier {

std::string python_json(const Json& value);

// Python's repr of a finite double: "1.0", "1e-05", "1e+16".
std::string python_float(double value);

}  // namespace espalier
