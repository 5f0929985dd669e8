// module: stages
// Any bytes given as run.json end in options that the quantizer accepts or in a message.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "stages/run_record.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto record = espalier::parse_run_record({reinterpret_cast<const char*>(data), size}, "run.json");
  if (record.ok()) CHECK(record->quantize.draft_stride >= 1 && record->quantize.encode.codec.n_cuts <= 4);
  return 0;
}
