// module: stages
// Any bytes given as MANIFEST.sha256, source.lock.json or matrices.jsonl end in entries or a message; no accepted name leaves
// its folder.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "stages/pack/manifest.h"
#include "stages/pack/verify.h"
#include "stages/provenance.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (const auto manifest = espalier::parse_manifest(text, "manifest"); manifest.ok()) {
    for (const auto& entry : *manifest) CHECK(espalier::is_inner_path(entry.name) && entry.sha256.size() == 64);
  }
  if (const auto lock = espalier::parse_source_lock(text, "lock"); lock.ok()) {
    for (const auto& record : *lock) CHECK(espalier::is_inner_path(record.name)) << record.name;
  }
  if (const auto digests = espalier::parse_matrix_digests(text, "matrices"); digests.ok()) {
    for (const auto& digest : *digests) CHECK(digest.k2 >= 0 && digest.k2 <= 16);
  }
  return 0;
}
