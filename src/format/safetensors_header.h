// The header of a safetensors file as SafetensorsWriter writes it, for whoever wants to know a file's size beforehand.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "format/safetensors.h"

namespace espalier {

// Length word and JSON of a file that holds these tensors in this order, padded so that data starts at a multiple of eight.
// *data_bytes: the size of the data after it. Errors: invalid_argument (empty, reserved or repeated names) naming `what`.
Result<std::string> safetensors_header(const std::vector<SafetensorsWriter::Declaration>& tensors,
                                       const std::map<std::string, std::string>& metadata, std::string_view what,
                                       uint64_t* data_bytes);

}  // namespace espalier
