// Which tensor of a pack lies in which file, for every layout. A function of tensor names alone, so that planning, writing,
// converting and predicting sizes agree.
//
// exllamav3:  model-XXXXX-of-YYYYY: one file per backbone layer and drafter stage, one for embedding, one for final norm and
//             head, one per Engram table, one for the rest (vision tower).
// vllm:       EXL3 matrices in model-exl3-L03-p0/-p1 (routed experts by halves), model-exl3-dense-L03, model-exl3-head,
//             model-exl3-mtp and model-exl3-mtp-experts; native tensors grouped as above, Engram tensors last and counted on
//             their own (…-of-00046, then -00047-of-00048).
// tensorfold: EXL3 matrices in layer-03 and head-mtp; native tensors in native; Engram tables in engram-01 (our name: the
//             public pack has none).
// Source: packs.md 1.1 to 1.3.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "format/safetensors.h"
#include "model/folder.h"

namespace espalier {

// Orders files as the release does: rest, embedding, layers, final norm and head, drafter, Engram tables.
struct ShardKey {
  enum Group { kRest, kEmbed, kLayers, kHead, kDrafter, kTables };
  Group group = kRest;
  int number = 0;  // layer or stage
  auto operator<=>(const ShardKey&) const = default;
};
ShardKey shard_key(std::string_view tensor);

// Name under which a tensor is stored by all layouts: "lm_head." becomes "head.", `wo_a.G.` and `wo_a.group.G.` become
// `wo_a.slice.G.`.
std::string canonical_name(const std::string& tensor);

// True for "P.trellis", "P.suh", … of an EXL3 matrix.
bool is_exl3_part(std::string_view tensor);
// The Engram tables (not the projection or the gates).
bool is_engram_table(std::string_view tensor);

struct PackFile {
  std::string name;
  std::vector<size_t> tensors;  // indices into the list given, in the order of storage: wide types first, then by name
};

// n_experts: routed experts per backbone layer (vllm halves them). Files sorted by name.
std::vector<PackFile> group_tensors(Layout layout, const std::vector<SafetensorsWriter::Declaration>& tensors, int64_t n_experts);

// Sorts indices by the width of the type, then by name, so that every tensor of a file is aligned.
void sort_for_storage(const std::vector<SafetensorsWriter::Declaration>& tensors, std::vector<size_t>* indices);

}  // namespace espalier
