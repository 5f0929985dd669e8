#include "stages/pack/pack.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/hash.h"
#include "format/json.h"
#include "format/safetensors.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

constexpr char kReaderVersion[] = "1.4.1";  // the exllamav3 release whose layout this is
constexpr uint32_t kMul1Multiplier = 0x83DCD12Du;
constexpr uint32_t kMcgMultiplier = 0xCBAC1FEDu;

std::string torch_dtype(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return "torch.bool";
    case DType::kU8:
      return "torch.uint8";
    case DType::kI8:
      return "torch.int8";
    case DType::kI16:
      return "torch.int16";
    case DType::kU16:
      return "torch.uint16";
    case DType::kI32:
      return "torch.int32";
    case DType::kU32:
      return "torch.uint32";
    case DType::kI64:
      return "torch.int64";
    case DType::kU64:
      return "torch.uint64";
    case DType::kF8E4M3:
      return "torch.float8_e4m3fn";
    case DType::kF8E5M2:
      return "torch.float8_e5m2";
    case DType::kF8E8M0:
      return "torch.float8_e8m0fnu";
    case DType::kF16:
      return "torch.float16";
    case DType::kBF16:
      return "torch.bfloat16";
    case DType::kF32:
      return "torch.float32";
    case DType::kF64:
      return "torch.float64";
  }
  return "torch.unknown";
}

bool ends_with(const std::string& text, std::string_view tail) {
  return text.size() >= tail.size() && text.compare(text.size() - tail.size(), tail.size(), tail) == 0;
}

// Module that owns a tensor: the name without its last part; a root tensor is its own module.
std::string module_of(const std::string& name) {
  const size_t dot = name.rfind('.');
  return dot == std::string::npos ? name : name.substr(0, dot);
}

// Regular files (links to files included) of a folder as sorted relative names. Links to folders are not entered, so a
// loop of links cannot hold us here.
Result<std::vector<std::string>> list_files(const fs::path& dir, bool recursive) {
  std::vector<std::string> names;
  std::error_code ec;
  fs::recursive_directory_iterator it(dir, ec);
  for (; !ec && it != fs::recursive_directory_iterator(); it.increment(ec)) {
    if (!recursive) it.disable_recursion_pending();
    std::error_code ignored;
    if (it->is_regular_file(ignored)) names.push_back(it->path().lexically_relative(dir).generic_string());
  }
  if (ec) return not_found("cannot list '" + dir.string() + "': " + ec.message());
  std::sort(names.begin(), names.end());
  return names;
}

Result<std::vector<fs::path>> shards_of(const fs::path& dir) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, list_files(dir, false));
  std::vector<fs::path> shards;
  for (const std::string& name : names) {
    if (ends_with(name, ".safetensors")) shards.push_back(dir / name);
  }
  if (shards.empty()) return data_loss("'" + dir.string() + "' holds no shards");
  return shards;
}

// Width of a trellis in half-bit units.
Result<int64_t> trellis_k2(const TensorEntry& entry, const fs::path& shard) {
  const bool ok = entry.shape.size() == 3 && entry.dtype == DType::kI16 && entry.shape[2] > 0 &&
                  entry.shape[2] % 8 == 0 && entry.shape[2] <= 128;
  if (!ok) {
    return data_loss("'" + shard.filename().string() + "' tensor '" + entry.name +
                     "': expected I16 [in/16, out/16, 16 x bits], found " + std::string(dtype_name(entry.dtype)) + " " +
                     shape_text(entry.shape));
  }
  return entry.shape[2] / 8;
}

// Files of a checkpoint's top folder that belong to every pack of it.
bool is_side_file(const std::string& name) {
  static constexpr const char* kPrefixes[] = {
      "tokenizer",        "special_tokens", "added_tokens",      "vocab",
      "merges",           "chat_template",  "generation_config", "preprocessor_config",
      "processor_config", "LICENSE",        "LICENCE",           "NOTICE",
      "COPYING"};
  if (ends_with(name, ".safetensors") || ends_with(name, ".index.json")) return false;
  if (ends_with(name, ".jinja")) return true;
  return std::any_of(std::begin(kPrefixes), std::end(kPrefixes), [&](const char* p) { return name.rfind(p, 0) == 0; });
}

Status copy_one(const fs::path& from, const fs::path& to) {
  ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(from));
  ASSIGN_OR_RETURN(AtomicFile out, AtomicFile::create(to));
  RETURN_IF_ERROR(out.write(file.bytes()));
  return out.commit();
}

// 3 as an integer, 2.5 as a number with a fraction.
Json bits_number(double bits) {
  return bits == std::floor(bits) ? Json(static_cast<int>(bits)) : Json(bits);
}

Json description(const Json& source_config, const PackFacts& facts) {
  Json q;
  q["quant_method"] = "exl3";
  q["version"] = kReaderVersion;
  q["producer"] = facts.producer;
  q["bits"] = std::round(facts.bits * 100) / 100;
  q["head_bits"] = bits_number(facts.head_bits > 0 ? facts.head_bits : 16);
  if (facts.mtp_bits > 0) q["mtp_bits"] = bits_number(facts.mtp_bits);
  q["calibration"] = {{"rows", facts.calibration_rows}, {"cols", facts.calibration_cols}};
  q["out_scales"] = "always";
  q["codebook"] = facts.codebook;
  if (const auto it = source_config.find("quantization_config"); it != source_config.end())
    q["original_quantization_config"] = *it;
  return q;
}

}  // namespace

Result<PackSummary> summarise_shards(const fs::path& dir) {
  ASSIGN_OR_RETURN(const std::vector<fs::path> shards, shards_of(dir));
  PackSummary summary;
  double bits = 0;
  double weights = 0;
  for (const fs::path& shard : shards) {
    ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::open(shard));
    for (const TensorEntry& entry : file.entries()) {
      ++summary.tensors;
      summary.tensor_bytes += entry.size_bytes();
      if (!ends_with(entry.name, ".trellis")) continue;
      ASSIGN_OR_RETURN(const int64_t k2, trellis_k2(entry, shard));
      ++summary.matrices;
      if (entry.name.rfind("layers.", 0) != 0) continue;
      const double n = static_cast<double>(entry.shape[0]) * static_cast<double>(entry.shape[1]) * 256.0;
      weights += n;
      bits += n * static_cast<double>(k2) / 2;
    }
  }
  summary.bpw = weights > 0 ? bits / weights : 0;
  return summary;
}

Status write_pack_description(const fs::path& dir, const fs::path& source_dir, const PackFacts& facts) {
  ASSIGN_OR_RETURN(const std::vector<fs::path> shards, shards_of(dir));
  std::map<std::string, std::string> weight_map;
  std::map<std::string, Json> storage;
  uint64_t total = 0;
  for (const fs::path& shard : shards) {
    ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::open(shard));
    for (const TensorEntry& entry : file.entries()) {
      if (!weight_map.emplace(entry.name, shard.filename().string()).second) {
        return internal_error("tensor '" + entry.name + "' was written twice");
      }
      total += entry.size_bytes();
      Json& module = storage[module_of(entry.name)];
      module["stored_tensors"][entry.name] = {
          {"shape", entry.shape}, {"n_bytes", entry.size_bytes()}, {"dtype", torch_dtype(entry.dtype)}};
      if (ends_with(entry.name, ".trellis")) {
        ASSIGN_OR_RETURN(const int64_t k2, trellis_k2(entry, shard));
        module["quant_format"] = "exl3";
        module["bits_per_weight"] = bits_number(static_cast<double>(k2) / 2);
      }
      if (ends_with(entry.name, ".mul1")) module["mul1_multiplier"] = kMul1Multiplier;
      if (ends_with(entry.name, ".mcg")) module["mcg_multiplier"] = kMcgMultiplier;
    }
  }
  Json index;
  index["metadata"] = {{"total_size", total}};
  index["weight_map"] = Json::object();
  for (const auto& [name, file] : weight_map)
    index["weight_map"].get_ref<Json::object_t&>().Container::emplace_back(name, file);
  RETURN_IF_ERROR(write_text_file(dir / "model.safetensors.index.json", dump_json(index, 1) + "\n"));

  ASSIGN_OR_RETURN(Json config, read_json_file(source_dir / "config.json"));
  if (!config.is_object()) return data_loss("'config.json': expected a JSON object");
  const Json block = description(config, facts);
  config["quantization_config"] = block;
  RETURN_IF_ERROR(write_text_file(dir / "config.json", dump_json(config, 2) + "\n"));

  Json full = block;
  full["tensor_storage"] = Json::object();
  for (auto& [module, entry] : storage) {
    full["tensor_storage"].get_ref<Json::object_t&>().Container::emplace_back(module, std::move(entry));
  }
  return write_text_file(dir / "quantization_config.json", dump_json(full, 1) + "\n");
}

Result<std::vector<std::string>> copy_side_files(const fs::path& source_dir, const fs::path& dir) {
  ASSIGN_OR_RETURN(std::vector<std::string> names, list_files(source_dir, false));
  std::erase_if(names, [](const std::string& name) { return !is_side_file(name); });
  std::error_code ec;
  if (fs::is_directory(source_dir / "encoding", ec)) {
    ASSIGN_OR_RETURN(const std::vector<std::string> inner, list_files(source_dir / "encoding", true));
    for (const std::string& name : inner) names.push_back("encoding/" + name);
  }
  std::sort(names.begin(), names.end());
  for (const std::string& name : names) {
    fs::create_directories((dir / name).parent_path(), ec);
    if (ec) return failed_precondition("cannot create the folder of '" + name + "': " + ec.message());
    RETURN_IF_ERROR(copy_one(source_dir / name, dir / name));
  }
  return names;
}

Result<uint64_t> write_manifest(const fs::path& dir, Progress& progress) {
  ASSIGN_OR_RETURN(std::vector<std::string> names, list_files(dir, true));
  std::erase(names, "MANIFEST.sha256");
  std::erase(names, AtomicDirectory::kMarker);
  uint64_t total = 0;
  std::error_code ec;
  std::string text;
  progress.begin("manifest", static_cast<int64_t>(names.size()));
  for (const std::string& name : names) {
    if (progress.is_cancelled()) return cancelled("stopped while hashing the pack");
    ASSIGN_OR_RETURN(const std::string hex, sha256_file_hex(dir / name));
    text += hex + "  " + name + "\n";
    total += fs::file_size(dir / name, ec);
    progress.advance(1, name);
  }
  RETURN_IF_ERROR(write_text_file(dir / "MANIFEST.sha256", text));
  return total + text.size();
}

}  // namespace espalier
