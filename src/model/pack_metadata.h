// What the side files of a pack say about its tensors, held against the tensors: quantization_config, the expert plan,
// tensor_storage, total_size. All of it is redundant, so every difference is a damaged or mixed-up folder.
//
// Public packs differ in the nesting of these blocks; unknown keys and absent files are fine. Source: packs.md 1.1, 1.2;
// exl3.md 6.7; docs/formats/pack.md.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "model/config.h"
#include "model/folder.h"
#include "model/pack_plan.h"

namespace espalier {

enum class MetadataDepth {
  kDeclarations,  // the config's block and the plan: what a loader needs to trust
  kEverything,    // also tensor_storage (tens of MB for a large pack) and the map's total_size
};

struct PackMetadata {
  Layout layout = Layout::kOfficial;
  std::string plan_file;         // name of the plan in the folder; empty: none
  std::optional<PackPlan> plan;  // parsed
  std::vector<std::string> notes;
  std::vector<std::string> problems;  // one line each: file, tensor or key, expected, found
};

// Reads the side files of index.dir(). Errors: data_loss for files that cannot be parsed at all.
Result<PackMetadata> check_pack_metadata(const TensorIndex& index, const Config& config, MetadataDepth depth);

}  // namespace espalier
