// module: format
// Any bytes are parsed as JSON or refused; what is accepted survives a round trip.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>

#include "base/check.h"
#include "format/json.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto value = espalier::parse_json(std::string_view(reinterpret_cast<const char*>(data), size), "fuzz");
  if (value.ok()) {
    const auto again = espalier::parse_json(espalier::dump_json(*value), "again");
    CHECK(again.ok()) << again.error().message();
    CHECK(*again == *value);
  }
  return 0;
}
