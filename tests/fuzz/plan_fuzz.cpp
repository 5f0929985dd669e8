// module: model
// Any bytes given as a pack plan end in a plan or a message; a plan that parses is written and read back as the same plan.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "model/pack_plan.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  espalier::Config config;
  config.n_layers = 2;
  config.n_experts = 4;
  config.drafter.n_stages = 1;
  config.drafter.n_experts = 2;
  const auto plan = espalier::parse_pack_plan({reinterpret_cast<const char*>(data), size}, "plan", config);
  if (!plan.ok()) return 0;
  const auto again = espalier::parse_pack_plan(espalier::pack_plan_json(*plan, config), "plan", config);
  CHECK(again.ok()) << again.status().message();
  CHECK(again->experts == plan->experts);
  return 0;
}
