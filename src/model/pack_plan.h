// Widths of every matrix of a pack as a file (exl3_moe_plan.json): what a quantizer is told and what a loader may size its
// buffers from. Redundant with the trellis shapes on purpose; whoever opens both compares them.
//
// One string per layer with one character per expert: '1'-'8' whole widths, 'a' 1.5, 'b' 2.5, 'c' 3.5, 'n' native MXFP4.
// `layers` gives w1, w2 and w3 of an expert one width, `matrices` one each. 'a', 'b', 'c', 'n' are read by this program
// only. Source: quality.md 3.6, packs.md 1.1; docs/formats/plan.md.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model/config.h"
#include "model/names.h"

namespace espalier {

// Stands for "keeps its native form" where a width in half bits is expected.
inline constexpr int kNativeWidth = 0;

// '3' for 6 half bits, 'b' for 5, 'n' for kNativeWidth; '?' for a width that no plan can say.
char width_char(int k2);
std::optional<int> width_from_char(char c);
// "3", "2.5", "native".
std::string width_text_of(int k2);

struct ExpertWidths {
  int w1 = 0, w3 = 0, w2 = 0;  // half bits; kNativeWidth for all three or none
  bool operator==(const ExpertWidths&) const = default;
};

struct PackPlan {
  // Block (layer, or n_layers + stage) -> one entry per expert. Blocks may be absent.
  std::map<int, std::vector<ExpertWidths>> experts;
  // Half bits by name, the most specific wins: a stem ("layers.3.attn.wq_a"), then for the backbone the projection
  // ("attn.wq_a") and the part ("attention", "shared", "index", "engram", "head"), for the drafter "drafter_dense".
  std::map<std::string, int> dense;
  std::optional<double> storage_bpw, read_bpw;  // as the budget states them

  // Width of a matrix, kNativeWidth included; empty when the plan does not say.
  std::optional<int> width_of(const MatrixSpec& spec, int n_layers) const;
};

// Accepts the wrapper keys `layers` and `matrices` as objects keyed by layer or as lists, keys "3", "L03" and "layers.3",
// strings of characters or lists of numbers, a list or an object as `drafter`, and unknown keys. Errors: data_loss naming
// `what`, the layer, expected and found: wrong lengths, layers or experts that the config lacks, unknown widths, a layer that
// `layers` and `matrices` both give without a `granularity` that says which counts, an expert that is native only in part. Threads: pure; fuzz target plan_fuzz.cpp.
Result<PackPlan> parse_pack_plan(std::string_view json_text, std::string_view what, const Config& config);

// The file of a plan: `layers` for blocks whose experts have one width each, `matrices` for the rest.
std::string pack_plan_json(const PackPlan& plan, const Config& config);

}  // namespace espalier
