// Compares what a config needs with what a model folder holds: names, types and shapes, before any data is read.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "format/tensor_index.h"
#include "model/config.h"
#include "model/names.h"
#include "model/weights.h"

namespace espalier {

// Stem under which the EXL3 form of a matrix is stored, or empty when it is not there. Packs differ in how they name
// the wo_a slices (`wo_a.slice.G`, `wo_a.G`, `wo_a.group.G`) and the head (`head`, `lm_head`).
std::string exl3_stem(const TensorIndex& index, const MatrixSpec& spec);
// Name of the tensor that holds the native form: `<stem>.weight`; for a wo_a slice the undivided `…wo_a.weight`.
std::string native_name(const MatrixSpec& spec);

// Finds everything that is missing or unexpected. Errors: data_loss for a tensor of the wrong type or shape (with file,
// expected, found). A native copy beside an EXL3 group is noted and ignored.
Result<Coverage> check_coverage(const TensorIndex& index, const Config& config);
// The same, and an error when anything is missing (not_found) or unexpected (data_loss).
Result<Coverage> require_coverage(const TensorIndex& index, const Config& config);

}  // namespace espalier
