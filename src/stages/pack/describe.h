// The text files of a pack that say what is in its shards: index, config.json, and the side file of the layout. Functions
// of the tensors' names and shapes, of the checkpoint's config and of a few facts that the tensors cannot tell, so that a
// size can be predicted before anything is encoded. Source: packs.md 1.1, 1.2; exl3.md 6.7; docs/formats/pack.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "base/status.h"
#include "format/safetensors.h"
#include "model/folder.h"
#include "stages/pack/layout.h"

namespace espalier {

// What the tensors cannot tell.
struct PackFacts {
  std::string producer;          // "espalier 0.1.0"
  std::string codebook;          // mul1, mcg or 3inst
  double bits = 0;               // card definition, see PackSummary::bpw
  double head_bits = 0;          // 0: the head is native
  double mtp_bits = 0;           // mean over the drafter's matrices; 0: no drafter, or native
  int64_t calibration_rows = 0;  // 0: not known
  int64_t calibration_cols = 0;  // longest row
  std::string original_quantization_json;  // the checkpoint's own block; empty: take it from its config
};

struct PackText {
  std::string name;
  std::string text;
};

// Trellis shape -> width in half bits. Errors: data_loss naming `file` and the tensor.
Result<int64_t> trellis_width(const SafetensorsWriter::Declaration& tensor, const std::string& file);

// bits, head_bits and mtp_bits of a set of tensors, and the codebook of the first matrix.
Result<PackFacts> measure_facts(const std::vector<SafetensorsWriter::Declaration>& tensors);

// `tensors` and `files` as given to and returned by group_tensors. config_text: a config.json of the model, the
// checkpoint's or a pack's. Errors: data_loss for a config or a trellis that is not one.
Result<std::vector<PackText>> describe_pack(Layout layout, const std::string& config_text, const PackFacts& facts,
                                            const std::vector<SafetensorsWriter::Declaration>& tensors,
                                            const std::vector<PackFile>& files);

// The facts that a finished pack states about itself (calibration, producer, the checkpoint's block), for a conversion.
Result<PackFacts> stated_facts(const std::filesystem::path& dir, Layout layout);

}  // namespace espalier
