// module: model
// Any bytes given as config.json end in a config or a message; a config that parses has a usable schedule.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "model/config.h"
#include "model/names.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto config = espalier::parse_config({reinterpret_cast<const char*>(data), size}, "config.json");
  if (!config.ok()) return 0;
  for (int l = 0; l < config->n_layers; ++l) {
    if (config->ratio(l) > 0 && (config->kv_source_of(l) < 0 || config->index_source_of(l) < 0)) __builtin_trap();
  }
  if (config->n_experts <= 64 && config->drafter.n_experts <= 64 && espalier::all_matrices(*config).empty())
    __builtin_trap();
  return 0;
}
