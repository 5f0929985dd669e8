// The options of a quantization as run.json keeps them, written and read back, so that a matrix can be encoded again from a
// pack's own record. Both directions stand here: an option that is added to one belongs into the other.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "base/status.h"
#include "format/json.h"
#include "stages/quantize/quantize.h"

namespace espalier {

// The kind of machine whose arithmetic made the bytes.
inline constexpr const char* kBackend = "cpu";

struct RunRecord {
  QuantizeOptions quantize;
  int64_t rows = 0;  // rows of the set that were used; 0: all
  std::string tool;
  std::string backend;
  std::string calibration_content_sha256;
};

// The member "options" of run.json.
Json options_json(const QuantizeOptions& options, int64_t rows);

// Reads a whole run.json. Widths of matrices come from the pack; here only the uniform ones are read. Errors: data_loss naming
// `what` and the option. Threads: pure; fuzz target run_record_fuzz.cpp.
Result<RunRecord> parse_run_record(std::string_view json_text, std::string_view what);

}  // namespace espalier
