#include "stages/pack/layout.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>

#include "base/check.h"

namespace espalier {
namespace {

// Number that follows `head` in the name; -1 when the name does not start with it.
int number_after(std::string_view name, std::string_view head) {
  if (name.substr(0, head.size()) != head) return -1;
  int value = -1;
  for (size_t i = head.size(); i < name.size() && name[i] >= '0' && name[i] <= '9' && value < 1000000; ++i) {
    value = 10 * std::max(value, 0) + (name[i] - '0');
  }
  return value;
}

std::string numbered(const char* format, int a, int b = 0) {
  char buffer[96];
  std::snprintf(buffer, sizeof buffer, format, a, b);
  return buffer;
}

int expert_of(std::string_view name) {
  const size_t at = name.find(".experts.");
  return at == std::string_view::npos ? -1 : number_after(name.substr(at), ".experts.");
}

std::string vllm_exl3_file(std::string_view name, int64_t n_experts) {
  const int expert = expert_of(name);
  if (const int layer = number_after(name, "layers."); layer >= 0) {
    if (expert < 0) return numbered("model-exl3-dense-L%02d.safetensors", layer);
    return numbered("model-exl3-L%02d-p%d.safetensors", layer, expert < (n_experts + 1) / 2 ? 0 : 1);
  }
  if (name.substr(0, 4) == "mtp.") {
    return expert < 0 ? "model-exl3-mtp.safetensors" : "model-exl3-mtp-experts.safetensors";
  }
  return "model-exl3-head.safetensors";
}

std::string tensorfold_file(std::string_view name) {
  const int layer = number_after(name, "layers.");
  if (is_engram_table(name)) return numbered("engram-%02d.safetensors", layer);
  if (!is_exl3_part(name)) return "native.safetensors";
  return layer >= 0 ? numbered("layer-%02d.safetensors", layer) : "head-mtp.safetensors";
}

// Numbered files: groups in order, those of `tail` counted on after the others.
void number_groups(const std::map<ShardKey, std::vector<size_t>>& groups, bool tables_apart, std::vector<PackFile>* files) {
  int n_tables = 0;
  for (const auto& [key, indices] : groups) n_tables += key.group == ShardKey::kTables ? 1 : 0;
  const int total = static_cast<int>(groups.size());
  int number = 0;
  for (const auto& [key, indices] : groups) {
    const bool is_counted_apart = tables_apart && key.group != ShardKey::kTables;
    files->push_back({numbered("model-%05d-of-%05d.safetensors", ++number, is_counted_apart ? total - n_tables : total),
                      indices});
  }
}

}  // namespace

ShardKey shard_key(std::string_view name) {
  if (name.substr(0, 6) == "embed.") return {ShardKey::kEmbed, 0};
  if (name.substr(0, 5) == "head." || name.substr(0, 5) == "norm.") return {ShardKey::kHead, 0};
  if (const int layer = number_after(name, "layers."); layer >= 0) {
    return {is_engram_table(name) ? ShardKey::kTables : ShardKey::kLayers, layer};
  }
  if (const int stage = number_after(name, "mtp."); stage >= 0) return {ShardKey::kDrafter, stage};
  return {ShardKey::kRest, 0};
}

std::string canonical_name(const std::string& tensor) {
  if (tensor.rfind("lm_head.", 0) == 0) return tensor.substr(3);
  const size_t at = tensor.find(".attn.wo_a.");
  if (at == std::string::npos) return tensor;
  const std::string head = tensor.substr(0, at + 11);
  std::string rest = tensor.substr(at + 11);
  if (rest.rfind("group.", 0) == 0) rest = rest.substr(6);
  return !rest.empty() && rest[0] >= '0' && rest[0] <= '9' ? head + "slice." + rest : tensor;
}

bool is_exl3_part(std::string_view tensor) {
  static constexpr std::array<std::string_view, 7> kParts = {".trellis", ".suh", ".svh", ".su", ".sv", ".mul1", ".mcg"};
  return std::any_of(kParts.begin(), kParts.end(), [&](std::string_view part) { return tensor.ends_with(part); });
}

bool is_engram_table(std::string_view tensor) { return tensor.find(".engram.embed.") != std::string_view::npos; }

void sort_for_storage(const std::vector<SafetensorsWriter::Declaration>& tensors, std::vector<size_t>* indices) {
  std::sort(indices->begin(), indices->end(), [&](size_t a, size_t b) {
    const int64_t wide_a = dtype_size_bytes(tensors[a].dtype);
    const int64_t wide_b = dtype_size_bytes(tensors[b].dtype);
    return wide_a != wide_b ? wide_a > wide_b : tensors[a].name < tensors[b].name;
  });
}

std::vector<PackFile> group_tensors(Layout layout, const std::vector<SafetensorsWriter::Declaration>& tensors,
                                    int64_t n_experts) {
  std::map<std::string, std::vector<size_t>> by_name;
  std::map<ShardKey, std::vector<size_t>> by_key;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string& name = tensors[i].name;
    if (layout == Layout::kTensorfold) {
      by_name[tensorfold_file(name)].push_back(i);
    } else if (layout == Layout::kVllm && is_exl3_part(name)) {
      by_name[vllm_exl3_file(name, n_experts)].push_back(i);
    } else {
      ShardKey key = shard_key(name);
      if (layout == Layout::kVllm && key.group == ShardKey::kLayers && name.find(".engram.") != std::string::npos) {
        key.group = ShardKey::kTables;  // as the release groups them, so that its own shards can be linked
      }
      by_key[key].push_back(i);
    }
  }
  std::vector<PackFile> files;
  for (auto& [name, indices] : by_name) files.push_back({name, std::move(indices)});
  number_groups(by_key, layout == Layout::kVllm, &files);
  for (PackFile& file : files) sort_for_storage(tensors, &file.tensors);
  std::sort(files.begin(), files.end(), [](const PackFile& a, const PackFile& b) { return a.name < b.name; });
  return files;
}

}  // namespace espalier
