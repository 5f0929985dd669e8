#include "model/folder.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "format/json.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

std::string quant_method(const fs::path& dir) {
  for (const char* name : {"config.json", "quantization_config.json"}) {
    std::error_code ec;
    if (fs::file_size(dir / name, ec) > (64u << 20) && !ec) continue;  // tensor_storage of a large pack: config.json has it
    const auto json = read_json_file(dir / name);
    if (!json.ok() || !json->is_object()) continue;
    const Json* q = &*json;
    if (q->contains("quantization_config")) q = &(*q)["quantization_config"];
    if (q->is_object() && q->contains("quant_method") && (*q)["quant_method"].is_string()) {
      return (*q)["quant_method"].get<std::string>();
    }
  }
  return "";
}

bool may_borrow(const TensorIndex& index, const std::string& name) {
  const size_t at = name.find(".engram.");
  if (name.rfind("layers.", 0) != 0 || at == std::string::npos) return false;
  const std::string part = name.substr(at + 8);
  const bool is_projection = part.rfind("wkv.", 0) == 0;
  return !is_projection || !index.contains(name.substr(0, at + 8) + "wkv.trellis");
}

}  // namespace

std::string_view layout_name(Layout layout) {
  switch (layout) {
    case Layout::kOfficial:
      return "official";
    case Layout::kExllamav3:
      return "exllamav3";
    case Layout::kVllm:
      return "vllm";
    case Layout::kTensorfold:
      return "tensorfold";
    case Layout::kOtherExl3:
      return "exl3";
  }
  return "exl3";
}

std::optional<Layout> pack_layout_from_name(std::string_view name) {
  for (const Layout layout : {Layout::kExllamav3, Layout::kVllm, Layout::kTensorfold}) {
    if (name == layout_name(layout)) return layout;
  }
  return std::nullopt;
}

Layout detect_layout(const fs::path& dir, const TensorIndex& index) {
  const std::string method = quant_method(dir);
  if (method == "deepseek_v41_exl3") return Layout::kVllm;
  if (method == "exl3") return Layout::kExllamav3;
  std::error_code ec;
  if (fs::exists(dir / "layer-00.safetensors", ec) && fs::exists(dir / "head-mtp.safetensors", ec)) {
    return Layout::kTensorfold;
  }
  const bool has_trellis = std::any_of(index.names().begin(), index.names().end(),
                                       [](const std::string& name) { return name.ends_with(".trellis"); });
  return has_trellis ? Layout::kOtherExl3 : Layout::kOfficial;
}

Result<TensorIndex> open_model_index(const fs::path& dir, const fs::path& engram_dir, bool allow_missing_files) {
  IndexOptions options;
  if (!engram_dir.empty()) {
    options.extra_dirs.push_back(engram_dir);
    options.may_borrow = may_borrow;
  }
  options.side_files = {kBiasFile};
  options.allow_missing_files = allow_missing_files;
  return TensorIndex::open(dir, options);
}

}  // namespace espalier
