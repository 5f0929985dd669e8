#include "model/pack_metadata.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "base/file.h"
#include "codec/codebook.h"
#include "format/json.h"
#include "model/coverage.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostProblems = 100;

std::string shorten(const Json& value) {
  std::string text = dump_json(value);
  return text.size() > 60 ? text.substr(0, 57) + "..." : text;
}

const Json* member(const Json* object, const char* key) {
  if (object == nullptr || !object->is_object()) return nullptr;
  const auto it = object->find(key);
  return it == object->end() ? nullptr : &*it;
}

class Check {
 public:
  Check(const TensorIndex& index, const Config& config, MetadataDepth depth)
      : index_(index), config_(config), depth_(depth), specs_(all_matrices(config)) {}

  Result<PackMetadata> run() {
    out_.layout = detect_layout(index_.dir(), index_);
    ASSIGN_OR_RETURN(const Json config_json, read_json_file(index_.dir() / "config.json", 64u << 20));
    Json facts;
    const Json* block = member(&config_json, "quantization_config");
    std::error_code ec;
    if (out_.layout == Layout::kTensorfold && fs::exists(fs::symlink_status(index_.dir() / kFactsFile, ec))) {
      ASSIGN_OR_RETURN(facts, read_json_file(index_.dir() / kFactsFile, 64u << 20));
      block = &facts;
    }
    RETURN_IF_ERROR(read_plan(block));
    if (out_.plan) compare_plan();
    if (out_.layout == Layout::kVllm) compare_vllm(member(block, "exl3_moe") != nullptr ? member(block, "exl3_moe") : block);
    if (out_.layout != Layout::kOfficial) compare_block(block);
    if (depth_ == MetadataDepth::kEverything) {
      RETURN_IF_ERROR(compare_storage());
      compare_total();
    }
    return std::move(out_);
  }

 private:
  void problem(const std::string& text) {
    if (out_.problems.size() < kMostProblems) out_.problems.push_back(text);
    if (out_.problems.size() == kMostProblems) out_.problems.push_back("more of these are not listed");
  }

  std::string declared_in() const {
    return out_.layout == Layout::kTensorfold ? kFactsFile : "config.json: quantization_config";
  }

  // Half bits of a matrix as stored; kNativeWidth when it is not EXL3; empty when it is absent.
  std::optional<int> stored_width(const MatrixSpec& spec) const {
    const std::string stem = exl3_stem(index_, spec);
    if (!stem.empty()) {
      const Shape& shape = index_.entry(stem + ".trellis")->shape;
      return shape.size() == 3 ? static_cast<int>(shape[2] / 8) : -1;
    }
    return index_.contains(native_name(spec)) ? std::optional<int>(kNativeWidth) : std::nullopt;
  }

  Status read_plan(const Json* block) {
    const Json* moe = member(block, "exl3_moe");
    std::string name;
    for (const Json* place : {moe, block}) {
      for (const char* key : {"plan", "plan_file"}) {
        const Json* value = member(place, key);
        if (name.empty() && value != nullptr && value->is_string()) name = value->get<std::string>();
      }
    }
    if (name.empty()) name = kPlanFile;
    if (name.find('/') != std::string::npos || name.find('\0') != std::string::npos || name == "..") {
      problem("config.json: quantization_config: expected the name of a plan in this folder, found '" + name + "'");
      return ok_status();
    }
    std::error_code ec;
    if (!fs::exists(fs::symlink_status(index_.dir() / name, ec))) {
      if (name != kPlanFile || out_.layout == Layout::kVllm) {
        out_.notes.push_back("'" + name + "' is missing; the widths come from the trellis shapes");
      }
      return ok_status();
    }
    ASSIGN_OR_RETURN(const std::string text, read_text_file(index_.dir() / name, 256u << 20));
    ASSIGN_OR_RETURN(out_.plan, parse_pack_plan(text, "'" + (index_.dir() / name).string() + "'", config_));
    out_.plan_file = name;
    return ok_status();
  }

  void compare_width(const MatrixSpec& spec, int declared, const std::string& where) {
    const std::optional<int> stored = stored_width(spec);
    if (!stored || *stored == declared) return;
    problem(where + ": tensor '" + spec.stem + ".trellis' ('" + file_of(spec) + "'): declared width " +
            width_text_of(declared) + ", stored " + width_text_of(*stored));
  }

  std::string file_of(const MatrixSpec& spec) const {
    const std::string stem = exl3_stem(index_, spec);
    return index_.file_of(stem.empty() ? native_name(spec) : stem + ".trellis").filename().string();
  }

  void compare_plan() {
    for (const MatrixSpec& spec : specs_) {
      const std::optional<int> declared = out_.plan->width_of(spec, config_.n_layers);
      if (declared && (spec.is_quantizable || *declared == kNativeWidth)) {
        compare_width(spec, *declared, out_.plan_file);
      }
    }
  }

  void compare_head(const Json* value, const char* key) {
    if (value == nullptr || !value->is_number()) return;
    for (const MatrixSpec& spec : specs_) {
      if (spec.kind != MatrixKind::kHead) continue;
      const double k2 = 2 * value->get<double>();
      compare_width(spec, k2 > 16 ? kNativeWidth : static_cast<int>(k2),  // 16 bits: not quantized
                    declared_in() + ": " + key);
    }
  }

  void compare_vllm(const Json* moe) {
    const Json* head = member(moe, "head");
    if (head == nullptr || *head == "exl3") compare_head(member(moe, "head_k"), "head_k");
    const Json* dense = member(moe, "dense");
    if (dense == nullptr) return;
    const std::string where = "config.json: quantization_config: exl3_moe.dense";
    if (!dense->is_object()) return problem(where + ": expected an object, found " + shorten(*dense));
    std::map<std::string, int> declared;
    for (const auto& [name, value] : dense->items()) {
      const double k2 = value.is_number() ? 2 * value.get<double>() : -1;
      if (!(k2 >= 2 && k2 <= 16) || k2 != static_cast<int>(k2)) {
        problem(where + ": '" + name + "': expected a width, found " + shorten(value));
      } else {
        declared.emplace(name, static_cast<int>(k2));
      }
    }
    std::unordered_set<std::string> met;
    for (const MatrixSpec& spec : specs_) {
      if (spec.expert >= 0) continue;
      for (const std::string& name : {spec.stem, module_stem(spec)}) {
        const auto it = declared.find(name);
        if (it == declared.end()) continue;
        met.insert(name);
        compare_width(spec, it->second, where);
        break;
      }
    }
    for (const auto& [name, k2] : declared) {
      if (met.count(name) == 0) problem(where + ": '" + name + "' is no matrix of this model");
    }
  }

  void compare_block(const Json* block) {
    compare_head(member(block, "head_bits"), "head_bits");
    const Json* codebook = member(block, "codebook");
    if (codebook == nullptr || !codebook->is_string()) return;
    const std::string declared = codebook->get<std::string>();
    for (const MatrixSpec& spec : specs_) {
      const std::string stem = exl3_stem(index_, spec);
      if (stem.empty()) continue;
      const std::string stored = index_.contains(stem + ".mul1")  ? "mul1"
                                 : index_.contains(stem + ".mcg") ? "mcg"
                                                                  : "3inst";
      if (stored != declared) {
        problem(declared_in() + ": codebook: tensor '" + stem + "' ('" + file_of(spec) +
                "'): declared " + declared + ", stored " + stored);
      }
    }
  }

  void compare_stored(const std::string& name, const Json& entry) {
    const std::string where = "quantization_config.json: tensor_storage: tensor '" + name + "'";
    const std::optional<ConstView> view = index_.find(name);
    if (!view) return problem(where + ": expected in the shards, found nowhere");
    const Json* shape = member(&entry, "shape");
    if (shape != nullptr && *shape != Json(view->shape)) {
      problem(where + " ('" + index_.file_of(name).filename().string() + "'): shape " + shorten(*shape) + ", stored " +
              shape_text(view->shape));
    }
    const Json* bytes = member(&entry, "n_bytes");
    if (bytes != nullptr && *bytes != Json(static_cast<uint64_t>(view->size_bytes()))) {
      problem(where + ": " + shorten(*bytes) + " bytes, stored " + std::to_string(view->size_bytes()));
    }
    const Json* dtype = member(&entry, "dtype");
    // Both names of the scale type are in use: exllamav3 reads it as bytes, PyTorch has a type for it.
    const bool is_scale = view->dtype == DType::kF8E8M0 && dtype != nullptr && *dtype == Json("torch.float8_e8m0fnu");
    if (dtype != nullptr && !is_scale && *dtype != Json(dtype_torch_name(view->dtype))) {
      problem(where + ": " + shorten(*dtype) + ", stored " + std::string(dtype_torch_name(view->dtype)));
    }
  }

  Status compare_storage() {
    std::error_code ec;
    const fs::path path = index_.dir() / "quantization_config.json";
    if (!fs::exists(fs::symlink_status(path, ec))) return ok_status();
    ASSIGN_OR_RETURN(const Json json, read_json_file(path));
    const Json* storage = member(&json, "tensor_storage");
    if (storage == nullptr) return ok_status();
    if (!storage->is_object()) {
      problem("quantization_config.json: tensor_storage: expected an object, found " + shorten(*storage));
      return ok_status();
    }
    std::unordered_set<std::string> listed;
    for (const auto& [module, entry] : storage->items()) {
      const Json* tensors = member(&entry, "stored_tensors");
      if (tensors == nullptr || !tensors->is_object()) continue;
      for (const auto& [name, tensor] : tensors->items()) {
        listed.insert(name);
        compare_stored(name, tensor);
      }
      const std::string where = "quantization_config.json: tensor_storage: '" + module + "': ";
      const std::optional<ConstView> trellis = index_.find(module + ".trellis");
      const Json* bits = member(&entry, "bits_per_weight");
      if (bits != nullptr && bits->is_number() && trellis && trellis->shape.size() == 3 &&
          16 * bits->get<double>() != static_cast<double>(trellis->shape[2])) {
        problem(where + "bits_per_weight " + shorten(*bits) + ", stored trellis " + shape_text(trellis->shape));
      }
      for (const auto& [key, marker, multiplier] :
           {std::tuple{"mul1_multiplier", ".mul1", codec::kMul1Multiplier},
            std::tuple{"mcg_multiplier", ".mcg", codec::kMcgMultiplier}}) {
        const Json* value = member(&entry, key);
        if (value == nullptr) continue;
        if (*value != Json(multiplier)) problem(where + key + " " + shorten(*value) + ", expected " + std::to_string(multiplier));
        if (!index_.contains(module + marker)) problem(where + key + " without a stored marker");
      }
    }
    for (const std::string& name : index_.names()) {
      const bool is_here = index_.file_of(name).parent_path() == index_.dir() &&
                           index_.file_of(name).filename() != kBiasFile;
      if (is_here && !is_ignored_name(name) && listed.count(name) == 0) {
        problem("quantization_config.json: tensor_storage does not list '" + name + "' of '" +
                index_.file_of(name).filename().string() + "'");
      }
    }
    return ok_status();
  }

  void compare_total() {
    if (!index_.declared_bytes() || !index_.missing_files().empty()) return;
    if (*index_.declared_bytes() != index_.mapped_bytes()) {
      problem("model.safetensors.index.json: total_size " + std::to_string(*index_.declared_bytes()) + ", stored " +
              std::to_string(index_.mapped_bytes()));
    }
  }

  const TensorIndex& index_;
  const Config& config_;
  const MetadataDepth depth_;
  const std::vector<MatrixSpec> specs_;
  PackMetadata out_;
};

}  // namespace

Result<PackMetadata> check_pack_metadata(const TensorIndex& index, const Config& config, MetadataDepth depth) {
  return Check(index, config, depth).run();
}

}  // namespace espalier
