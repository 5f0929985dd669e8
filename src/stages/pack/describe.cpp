#include "stages/pack/describe.h"

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "codec/codebook.h"
#include "format/json.h"
#include "model/pack_plan.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;
using Declaration = SafetensorsWriter::Declaration;

constexpr char kReaderVersion[] = "1.4.1";      // the exllamav3 release whose layout this is
constexpr char kMoeReaderVersion[] = "1.6.0";   // the one that the vllm layout names

// Module that owns a tensor: the name without its last part; a root tensor is its own module.
std::string module_of(const std::string& name) {
  const size_t dot = name.rfind('.');
  return dot == std::string::npos ? name : name.substr(0, dot);
}

bool is_trellis(const Declaration& t) { return t.name.ends_with(".trellis"); }

uint64_t bytes_of(const Declaration& t) { return static_cast<uint64_t>(n_elements(t.shape) * dtype_size_bytes(t.dtype)); }

// 3 as an integer, 2.5 as a number with a fraction.
Json bits_number(double bits) { return bits == std::floor(bits) ? Json(static_cast<int>(bits)) : Json(bits); }
Json rounded_bits(double bits) { return bits_number(std::round(bits * 100) / 100); }

void append(Json& object, const std::string& key, Json value) {  // without ordered_json's linear search; the key is new
  object.get_ref<Json::object_t&>().Container::emplace_back(key, std::move(value));
}

// What every layout says beside its own keys.
void add_facts(Json& q, const PackFacts& facts, const Json& original) {
  q["producer"] = facts.producer;
  q["bits"] = std::round(facts.bits * 100) / 100;
  q["head_bits"] = bits_number(facts.head_bits > 0 ? facts.head_bits : 16);
  if (facts.mtp_bits > 0) q["mtp_bits"] = rounded_bits(facts.mtp_bits);
  if (facts.calibration_rows > 0) {
    q["calibration"] = {{"rows", facts.calibration_rows}, {"cols", facts.calibration_cols}};
  }
  q["out_scales"] = "always";
  q["codebook"] = facts.codebook;
  if (!original.is_null()) q["original_quantization_config"] = original;
}

std::string index_text(const std::vector<Declaration>& tensors, const std::vector<PackFile>& files) {
  std::map<std::string, std::string> weight_map;
  uint64_t total = 0;
  for (const PackFile& file : files) {
    for (const size_t i : file.tensors) {
      weight_map.emplace(tensors[i].name, file.name);
      total += bytes_of(tensors[i]);
    }
  }
  Json index;
  index["metadata"] = {{"total_size", total}};
  index["weight_map"] = Json::object();
  for (const auto& [name, file] : weight_map) append(index["weight_map"], name, file);
  return dump_json(index, 1) + "\n";
}

// quantization_config.json: the block with every module's tensors, width and codebook.
Result<std::string> storage_text(Json block, const std::vector<Declaration>& tensors, const std::vector<PackFile>& files) {
  std::map<std::string, Json> storage;
  for (const PackFile& file : files) {
    for (const size_t i : file.tensors) {
      const Declaration& t = tensors[i];
      Json& module = storage[module_of(t.name)];
      module["stored_tensors"][t.name] = {
          {"shape", t.shape}, {"n_bytes", bytes_of(t)}, {"dtype", std::string(dtype_torch_name(t.dtype))}};
      if (is_trellis(t)) {
        ASSIGN_OR_RETURN(const int64_t k2, trellis_width(t, file.name));
        module["quant_format"] = "exl3";
        module["bits_per_weight"] = bits_number(static_cast<double>(k2) / 2);
      }
      if (t.name.ends_with(".mul1")) module["mul1_multiplier"] = codec::kMul1Multiplier;
      if (t.name.ends_with(".mcg")) module["mcg_multiplier"] = codec::kMcgMultiplier;
    }
  }
  block["tensor_storage"] = Json::object();
  for (auto& [module, entry] : storage) append(block["tensor_storage"], module, std::move(entry));
  return dump_json(block, 1) + "\n";
}

// Width of every matrix as a plan and as the map of dense modules (a wo_a counts once: its slices have one width, else
// each is named).
struct Widths {
  PackPlan plan;
  std::map<std::string, double> dense;  // module -> bits, for config.json
  double head = 0;
};

Result<Widths> widths_of(const Config& config, const std::vector<Declaration>& tensors) {
  std::map<std::string, int> k2_of;
  for (const Declaration& t : tensors) {
    if (!is_trellis(t)) continue;
    ASSIGN_OR_RETURN(const int64_t k2, trellis_width(t, "pack"));
    k2_of[module_of(t.name)] = static_cast<int>(k2);
  }
  Widths out;
  std::map<std::string, std::map<std::string, int>> slices;  // wo_a module -> slice -> k2
  for (const MatrixSpec& spec : all_matrices(config)) {
    const auto it = k2_of.find(spec.stem);
    if (spec.expert >= 0) {
      auto& experts = out.plan.experts[spec.block];
      experts.resize(static_cast<size_t>(spec.block < config.n_layers ? config.n_experts : config.drafter.n_experts));
      ExpertWidths& w = experts[static_cast<size_t>(spec.expert)];
      int& place = spec.kind == MatrixKind::kExpertW1 ? w.w1 : spec.kind == MatrixKind::kExpertW3 ? w.w3 : w.w2;
      place = it == k2_of.end() ? kNativeWidth : it->second;
    } else if (it == k2_of.end()) {
      if (spec.is_quantizable) out.plan.dense[module_stem(spec)] = kNativeWidth;
    } else if (spec.kind == MatrixKind::kHead) {
      out.head = it->second / 2.0;
      out.plan.dense[spec.stem] = it->second;
    } else {
      slices[module_stem(spec)][spec.stem] = it->second;
    }
  }
  for (const auto& [module, parts] : slices) {
    bool is_one = true;
    for (const auto& [stem, k2] : parts) is_one = is_one && k2 == parts.begin()->second;
    for (const auto& [stem, k2] : parts) {
      out.plan.dense[is_one ? module : stem] = k2;
      out.dense[is_one ? module : stem] = k2 / 2.0;
    }
  }
  return out;
}

Json vllm_block(const Widths& widths) {
  Json q;
  q["quant_method"] = "deepseek_v41_exl3";
  Json& moe = q["exl3_moe"];
  moe["plan"] = kPlanFile;
  moe["plan_file"] = kPlanFile;  // which of the two keys the public engine reads is not known
  moe["decode_kernel"] = "coop";
  moe["tp_layout"] = "channels";
  moe["exllamav3_version"] = kMoeReaderVersion;
  moe["head"] = widths.head > 0 ? "exl3" : "native";
  if (widths.head > 0) moe["head_k"] = bits_number(widths.head);
  moe["dense"] = Json::object();
  for (const auto& [module, bits] : widths.dense) append(moe["dense"], module, bits_number(bits));
  return q;
}

}  // namespace

Result<int64_t> trellis_width(const Declaration& t, const std::string& file) {
  const bool ok = t.shape.size() == 3 && (t.dtype == DType::kI16 || t.dtype == DType::kU16) && t.shape[2] > 0 &&
                  t.shape[2] % 8 == 0 && t.shape[2] <= 128;
  if (!ok) {
    return data_loss("'" + file + "' tensor '" + t.name + "': expected I16 [in/16, out/16, 16 x bits], found " +
                     std::string(dtype_name(t.dtype)) + " " + shape_text(t.shape));
  }
  return t.shape[2] / 8;
}

Result<PackFacts> measure_facts(const std::vector<Declaration>& tensors) {
  PackFacts facts;
  facts.codebook = "3inst";
  struct Mean {
    double bits = 0, weights = 0;
    double value() const { return weights > 0 ? bits / weights : 0; }
  } card, head, drafter;
  for (const Declaration& t : tensors) {
    if (t.name.ends_with(".mul1")) facts.codebook = "mul1";
    if (t.name.ends_with(".mcg")) facts.codebook = "mcg";
    if (!is_trellis(t)) continue;
    ASSIGN_OR_RETURN(const int64_t k2, trellis_width(t, "pack"));
    Mean& mean = t.name.rfind("layers.", 0) == 0 ? card : t.name.rfind("mtp.", 0) == 0 ? drafter : head;
    const double n = static_cast<double>(t.shape[0]) * static_cast<double>(t.shape[1]) * 256.0;
    mean.weights += n;
    mean.bits += n * static_cast<double>(k2) / 2;
  }
  facts.bits = card.value();
  facts.head_bits = head.value();
  facts.mtp_bits = drafter.value();
  return facts;
}

Result<std::vector<PackText>> describe_pack(Layout layout, const std::string& config_text, const PackFacts& facts,
                                            const std::vector<Declaration>& tensors, const std::vector<PackFile>& files) {
  ASSIGN_OR_RETURN(Json config, parse_json(config_text, "'config.json'"));
  if (!config.is_object()) return data_loss("'config.json': expected a JSON object");
  Json original;
  if (!facts.original_quantization_json.empty()) {
    ASSIGN_OR_RETURN(original, parse_json(facts.original_quantization_json, "original_quantization_config"));
  } else if (const auto it = config.find("quantization_config"); it != config.end()) {
    original = *it;
  }
  std::vector<PackText> out;
  out.push_back({"model.safetensors.index.json", index_text(tensors, files)});

  Json block;
  if (layout == Layout::kVllm) {
    ASSIGN_OR_RETURN(const Config parsed, parse_config(config_text, "config.json"));
    ASSIGN_OR_RETURN(const Widths widths, widths_of(parsed, tensors));
    block = vllm_block(widths);
    out.push_back({kPlanFile, pack_plan_json(widths.plan, parsed)});
  } else {
    block["quant_method"] = "exl3";
    block["version"] = kReaderVersion;
  }
  add_facts(block, facts, original);
  if (layout == Layout::kTensorfold) {
    config["quantization_config"] = original;
    if (original.is_null()) config.erase("quantization_config");
    out.push_back({kFactsFile, dump_json(block, 2) + "\n"});
  } else {
    config["quantization_config"] = block;
  }
  out.push_back({"config.json", dump_json(config, 2) + "\n"});
  if (layout == Layout::kExllamav3) {
    ASSIGN_OR_RETURN(std::string text, storage_text(block, tensors, files));
    out.push_back({"quantization_config.json", std::move(text)});
  }
  return out;
}

Result<PackFacts> stated_facts(const fs::path& dir, Layout layout) {
  PackFacts facts;
  ASSIGN_OR_RETURN(const Json config, read_json_file(dir / "config.json", 64u << 20));
  Json block = config.is_object() && config.contains("quantization_config") ? config["quantization_config"] : Json();
  if (layout == Layout::kTensorfold || layout == Layout::kOtherExl3) {
    std::error_code ec;
    if (block.is_object() && block.contains("quant_method") && block["quant_method"] == "fp8") {
      facts.original_quantization_json = dump_json(block);
    }
    if (!fs::exists(fs::symlink_status(dir / kFactsFile, ec))) return facts;
    ASSIGN_OR_RETURN(block, read_json_file(dir / kFactsFile, 64u << 20));
  }
  if (!block.is_object()) return facts;
  const auto text = [&](const char* key) {
    const auto it = block.find(key);
    return it != block.end() && it->is_string() ? it->get<std::string>() : std::string();
  };
  facts.producer = text("producer");
  if (const auto it = block.find("calibration"); it != block.end() && it->is_object()) {
    const auto number = [&](const char* key) {
      const auto v = it->find(key);
      return v != it->end() && v->is_number_unsigned() ? static_cast<int64_t>(v->get<uint64_t>() & INT64_MAX) : int64_t{0};
    };
    facts.calibration_rows = number("rows");
    facts.calibration_cols = number("cols");
  }
  if (const auto it = block.find("original_quantization_config"); it != block.end() && !it->is_null()) {
    facts.original_quantization_json = dump_json(*it);
  }
  return facts;
}

}  // namespace espalier
