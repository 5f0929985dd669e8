#include "model/inventory.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "format/json.h"
#include "format/tensor_index.h"
#include "model/config.h"
#include "model/names.h"

namespace espalier {
namespace {

std::string quant_method(const std::string& dir) {
  for (const char* name : {"/config.json", "/quantization_config.json"}) {
    const auto json = read_json_file(dir + name);
    if (!json.ok() || !json->is_object()) continue;
    const Json* q = &*json;
    if (q->contains("quantization_config")) q = &(*q)["quantization_config"];
    if (q->is_object() && q->contains("quant_method") && (*q)["quant_method"].is_string()) {
      return (*q)["quant_method"].get<std::string>();
    }
  }
  return "";
}

std::string family_of(const std::string& dir, int64_t n_exl3) {
  const std::string method = quant_method(dir);
  if (method == "deepseek_v41_exl3") return "vllm";
  if (method == "exl3") return "exllamav3";
  std::error_code ec;
  if (std::filesystem::exists(dir + "/layer-00.safetensors", ec) &&
      std::filesystem::exists(dir + "/head-mtp.safetensors", ec)) {
    return "tensorfold";
  }
  return n_exl3 > 0 ? "exl3" : "official";
}

std::string part_of(const MatrixSpec& m, int n_layers) {
  if (m.block >= n_layers || m.kind == MatrixKind::kMainProj) return "drafter";
  switch (m.kind) {
    case MatrixKind::kWqA:
    case MatrixKind::kWqB:
    case MatrixKind::kWkv:
    case MatrixKind::kWoA:
    case MatrixKind::kWoB: return "attention";
    case MatrixKind::kCompressorWkv:
    case MatrixKind::kCompressorWgate:
    case MatrixKind::kIndexerWqB:
    case MatrixKind::kIndexerWk: return "index";
    case MatrixKind::kExpertW1:
    case MatrixKind::kExpertW3:
    case MatrixKind::kExpertW2: return "routed";
    case MatrixKind::kSharedW1:
    case MatrixKind::kSharedW3:
    case MatrixKind::kSharedW2: return "shared";
    case MatrixKind::kEngramWkv: return "engram";
    case MatrixKind::kHead: return "head";
    case MatrixKind::kMainProj: return "drafter";
  }
  return "other";
}

// Stem of the stored native matrix: wo_a is one tensor for all groups.
std::string native_stem(const MatrixSpec& m) {
  if (m.kind != MatrixKind::kWoA) return m.stem;
  return m.stem.substr(0, m.stem.find(".slice."));
}

struct Bits {
  double trellis = 0;
  double weights = 0;
  double mean() const { return weights > 0 ? trellis / weights : 0; }
};

// Names of the tensors that hold one matrix, in whatever form it is there; empty when it is absent.
std::vector<std::string> stored_names(const TensorIndex& index, const MatrixSpec& m) {
  if (index.contains(m.stem + ".trellis")) {
    std::vector<std::string> names;
    for (const char* suffix : {".trellis", ".suh", ".svh", ".su", ".sv", ".mul1", ".mcg"}) {
      if (index.contains(m.stem + suffix)) names.push_back(m.stem + suffix);
    }
    return names;
  }
  const std::string stem = native_stem(m);
  if (!index.contains(stem + ".weight")) return {};
  std::vector<std::string> names = {stem + ".weight"};
  if (index.contains(stem + ".scale")) names.push_back(stem + ".scale");
  return names;
}

}  // namespace

Result<Inventory> take_inventory(const std::string& dir, const std::string& engram_dir) {
  ASSIGN_OR_RETURN(const Config config, load_config(dir));
  std::vector<std::filesystem::path> extra;
  if (!engram_dir.empty()) extra.emplace_back(engram_dir);
  ASSIGN_OR_RETURN(const TensorIndex index, TensorIndex::open(dir, extra));

  Inventory out;
  out.n_tensors = static_cast<int64_t>(index.names().size());
  out.bytes = index.total_bytes();
  out.n_files = static_cast<int64_t>(index.files().size());

  std::set<std::string> used;
  const auto use = [&](const std::string& name, const std::string& part) {
    if (used.insert(name).second) out.bytes_by_part[part] += static_cast<uint64_t>(index.find(name)->size_bytes());
  };
  Bits routed, card;
  for (const MatrixSpec& m : all_matrices(config)) {
    const std::string part = part_of(m, config.n_layers);
    if (m.is_quantizable) ++out.n_matrices;
    const std::vector<std::string> names = stored_names(index, m);
    if (names.empty()) {
      out.missing.push_back(native_stem(m) + ".weight");
      continue;
    }
    for (const std::string& name : names) use(name, part);
    if (names.front() != m.stem + ".trellis") continue;
    const ConstView trellis = *index.find(names.front());
    if (trellis.shape.size() != 3 || trellis.shape[2] % 8 != 0 || trellis.shape[2] <= 0 || trellis.shape[2] > 128) {
      return data_loss("'" + index.file_of(names.front()).string() + "': tensor '" + names.front() +
                       "': expected a trellis [in/16, out/16, 16 x bits], found " + shape_text(trellis.shape));
    }
    ++out.n_exl3;
    const int k2 = static_cast<int>(trellis.shape[2] / 8);
    ++out.widths[part][k2];
    const double weights = static_cast<double>(m.in) * static_cast<double>(m.out);
    const Bits one{weights * k2 / 2, weights};
    if (part == "routed") {
      routed.trellis += one.trellis;
      routed.weights += one.weights;
    }
    if (part != "head" && part != "drafter") {
      card.trellis += one.trellis;
      card.weights += one.weights;
    }
  }
  for (const TensorSpec& t : plain_tensors(config)) {
    if (!index.contains(t.name)) {
      if (!t.is_optional) out.missing.push_back(t.name);
      continue;
    }
    const bool is_table = t.name.find(".engram.embed.") != std::string::npos;
    use(t.name, is_table ? "engram tables" : t.name == "embed.weight" ? "embedding" : "other");
  }
  for (const std::string& name : index.names()) {
    if (used.count(name) != 0) continue;
    out.bytes_by_part["other"] += static_cast<uint64_t>(index.find(name)->size_bytes());
    if (!is_ignored_name(name)) out.unexpected.push_back(name);
  }
  out.bpw_routed_stored = routed.mean();
  out.bpw_card = card.mean();
  out.family = family_of(dir, out.n_exl3);
  return out;
}

}  // namespace espalier
