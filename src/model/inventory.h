// What is in a model folder, from headers only: layout family, sizes, widths of the EXL3 matrices, bits per weight, and what is
// missing or unexpected for its config. Nothing is decoded. Source: packs.md 1.5 and 2.1; docs/formats/pack.md.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/status.h"

namespace espalier {

struct Inventory {
  std::string family;             // official, exllamav3, vllm, tensorfold, or "exl3" for another folder with EXL3 matrices
  int64_t n_tensors = 0;
  uint64_t bytes = 0;             // tensor data
  int64_t n_files = 0;
  int64_t n_matrices = 0;         // matrices that a quantizer may replace
  int64_t n_exl3 = 0;             // of those, stored as EXL3
  // Width in half bits -> number of EXL3 matrices, per kind: "routed", "shared", "attention", "index", "engram", "head", "drafter".
  std::map<std::string, std::map<int, int64_t>> widths;
  // Bits per weight; 0 when nothing of the set is EXL3. Stored: mean over routed experts of the backbone. Card: trellis bits over
  // routed and shared experts, attention, compressor, indexer and Engram projection of the backbone.
  double bpw_routed_stored = 0;
  double bpw_card = 0;
  std::map<std::string, uint64_t> bytes_by_part;  // same parts plus "engram tables", "embedding", "other"
  std::vector<std::string> missing;     // needed by the config and absent
  std::vector<std::string> unexpected;  // present, neither needed nor known to be ignorable
};

// Errors: not_found / data_loss for an unreadable config, index or shard header; a damaged trellis shape.
Result<Inventory> take_inventory(const std::string& dir, const std::string& engram_dir = "");

}  // namespace espalier
