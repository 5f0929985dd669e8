// A MatrixRecord as JSON and back, for files that keep encoded matrices between runs. Numbers survive exactly. Internal to the stage.
#pragma once

#include "format/json.h"
#include "stages/quantize/encode.h"

namespace espalier {

Json record_json(const MatrixRecord& record);
// Throws nlohmann's exceptions for another form: the caller turns them into data_loss with the file's name.
MatrixRecord record_of(const Json& json);

}  // namespace espalier
