// module: model
// Any bytes given as a sensitivity table end in a table or a message; a table that parses is written and read back as
// the same table.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "model/sensitivity.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  espalier::Config config;
  config.n_layers = 2;
  config.n_experts = 3;
  const auto table = espalier::parse_sensitivity({reinterpret_cast<const char*>(data), size}, "S.json", config);
  if (!table.ok()) return 0;
  const auto again = espalier::parse_sensitivity(espalier::sensitivity_json(*table, config), "S.json", config);
  CHECK(again.ok()) << again.status().message();
  CHECK(*again == *table);
  return 0;
}
