// module: format
// Any bytes given as a safetensors file are parsed or refused; what is accepted covers the bytes exactly.
#include <cstdint>
#include <span>

#include "base/check.h"
#include "format/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto header = espalier::parse_safetensors_header(std::span(data, size), size, "fuzz");
  if (header.ok()) {
    uint64_t covered = 0;
    for (const espalier::TensorEntry& e : header->entries) {
      CHECK(e.begin <= e.end && e.end <= size);
      covered += e.size_bytes();
    }
    CHECK(covered < size);
  }
  return 0;
}
