// What is in a model folder, from headers only: layout, sizes, widths of the EXL3 matrices, bits per weight, and what is
// missing, unexpected or contradictory for its config. No tensor data is read. Source: packs.md 1.5 and 2.1; docs/formats/pack.md.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "model/config.h"
#include "model/folder.h"

namespace espalier {

// Width in half bits -> number of matrices.
using WidthCounts = std::map<int, int64_t>;

struct Inventory {
  Layout layout = Layout::kOfficial;
  int64_t n_tensors = 0;
  uint64_t bytes = 0;             // tensor data
  int64_t n_files = 0;
  int64_t n_matrices = 0;         // matrices that a quantizer may replace
  int64_t n_exl3 = 0;             // of those, stored as EXL3
  // Per part (names.h): "routed", "shared", "attention", "index", "engram", "head", "drafter".
  std::map<std::string, WidthCounts> widths;
  // Block (layer, or n_layers + stage) -> projection ("attn.wq_a", "ffn.experts.w1") -> widths.
  std::map<int, std::map<std::string, WidthCounts>> widths_by_block;
  // Block -> mean width in bits of each routed expert's three matrices; 0 for a native one.
  std::map<int, std::vector<double>> expert_bits;
  // Matrices that are not EXL3: part -> "fp8", "mxfp4", "bf16", "f32" -> number.
  std::map<std::string, std::map<std::string, int64_t>> native;
  // Bits per weight; 0 when nothing of the set is EXL3. Stored: mean over routed experts of the backbone. Card: trellis bits over
  // routed and shared experts, attention, compressor, indexer and Engram projection of the backbone.
  double bpw_routed_stored = 0;
  double bpw_card = 0;
  // The stored mean weighted by how often experts are read; empty when nothing says how often.
  std::optional<double> bpw_routed_read;
  std::string read_source;  // where that came from: "run.json" (calibration routing), the plan's name
  std::map<std::string, uint64_t> bytes_by_part;  // same parts plus "engram tables", "embedding", "other"
  std::vector<std::string> missing;        // needed by the config and absent
  std::vector<std::string> unexpected;     // present, neither needed nor known to be ignorable
  std::vector<std::string> missing_files;  // named by the index and nowhere
  std::vector<std::string> notes;          // optional tensors that are absent, copies that are ignored
  std::vector<std::string> problems;       // side files that contradict the tensors
};

// Errors: not_found / data_loss for an unreadable config, index or shard header; a tensor of the wrong type or shape.
Result<Inventory> take_inventory(const std::string& dir, const std::string& engram_dir = "");
// The same for an index that is open already.
Result<Inventory> take_inventory(const TensorIndex& index, const Config& config);

}  // namespace espalier
