// A model folder on disk: which layout it has, and the index over its tensors, wherever they lie.
//
// Four layouts are known: the official checkpoint and three of EXL3 packs, which use the same tensor names and differ in the
// grouping of files and in the side files that declare widths. The label decides which side files are cross-checked; what a
// matrix is follows from the tensors alone. Source: packs.md 1.5; docs/formats/pack.md.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"
#include "format/tensor_index.h"

namespace espalier {

enum class Layout {
  kOfficial,
  kExllamav3,   // numbered shards, quantization_config.json
  kVllm,        // model-exl3-*.safetensors, exl3_moe_plan.json
  kTensorfold,  // layer-NN.safetensors, head-mtp.safetensors, native.safetensors
  kOtherExl3,   // EXL3 matrices under the same names, grouped in some other way
};

// Router biases of image tokens, which some packs lack; read besides the map when it is in the folder.
inline constexpr const char* kBiasFile = "bias_vl.safetensors";
inline constexpr const char* kPlanFile = "exl3_moe_plan.json";
// What config.json's quantization_config says in the other layouts; a tensorfold pack keeps the checkpoint's config.json.
inline constexpr const char* kFactsFile = "exl3_pack.json";

// "official", "exllamav3", "vllm", "tensorfold", "exl3".
std::string_view layout_name(Layout layout);
// The names of --layout: exllamav3, vllm, tensorfold.
std::optional<Layout> pack_layout_from_name(std::string_view name);

// In this order: quant_method deepseek_v41_exl3, quant_method exl3, the files layer-00 and head-mtp, any trellis.
// Broken JSON counts as no statement here; whoever reads the file reports it.
Layout detect_layout(const std::filesystem::path& dir, const TensorIndex& index);

// Index over `dir`, over a side file of image biases, and over `engram_dir` (empty: none): files that the map of `dir` names
// and Engram tensors that `dir` lacks are taken from there. An FP8 engram.wkv beside the tables is left alone when the pack
// has its own. Errors: those of TensorIndex::open.
Result<TensorIndex> open_model_index(const std::filesystem::path& dir, const std::filesystem::path& engram_dir,
                                     bool allow_missing_files = false);

}  // namespace espalier
