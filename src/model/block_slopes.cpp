#include "model/block_slopes.h"

#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/hash.h"
#include "format/json.h"
#include "format/safetensors.h"

namespace espalier {
namespace {

constexpr int64_t kMaxBlocks = int64_t{1} << 24;

template <typename T>
Status take(const SafetensorsFile& file, const std::string& where, const char* name, const Shape& shape,
            std::vector<T>& out) {
  const TensorEntry* entry = file.find(name);
  if (entry == nullptr) return data_loss(where + ": array '" + name + "' is missing");
  if (entry->dtype != DTypeOf<T>::value || entry->shape != shape) {
    return data_loss(where + ": array '" + name + "': expected " + std::string(dtype_name(DTypeOf<T>::value)) + " " +
                     shape_text(shape) + ", found " + std::string(dtype_name(entry->dtype)) + " " +
                     shape_text(entry->shape));
  }
  out.resize(static_cast<size_t>(entry->size_bytes() / sizeof(T)));
  if (!out.empty()) std::memcpy(out.data(), file.view(*entry).data, out.size() * sizeof(T));
  return ok_status();
}

}  // namespace

Result<BlockSlopes> read_block_slopes(const std::filesystem::path& path, const Config& config) {
  ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::open(path));
  const std::string where = "block slopes '" + path.string() + "'";
  BlockSlopes out;
  out.metadata = file.metadata();
  if (out.metadata["schema"] != kBlocksSchema) {
    return data_loss(where + ": expected schema " + kBlocksSchema + ", found '" + out.metadata["schema"] + "'");
  }
  ASSIGN_OR_RETURN(const Json domains, parse_json(out.metadata["domains"], where + ": metadata 'domains'"));
  if (!domains.is_array() || domains.empty())
    return data_loss(where + ": metadata 'domains': expected a list of names");
  for (const Json& name : domains) {
    if (!name.is_string()) return data_loss(where + ": metadata 'domains': expected a list of names");
    out.domains.push_back(name.get<std::string>());
  }
  const TensorEntry* entry = file.find("domain");
  const int64_t n = entry == nullptr || entry->shape.size() != 1 ? 0 : entry->shape[0];
  if (n < 1 || n > kMaxBlocks) {
    return data_loss(where + ": array 'domain': expected one dimension of 1 to " + std::to_string(kMaxBlocks) +
                     " blocks");
  }
  RETURN_IF_ERROR(take(file, where, "domain", {n}, out.domain));
  RETURN_IF_ERROR(take(file, where, "positions", {n}, out.positions));
  RETURN_IF_ERROR(take(file, where, "slope", {n, config.n_layers}, out.slope));
  std::vector<int> blocks(out.domains.size(), 0);
  for (size_t b = 0; b < out.domain.size(); ++b) {
    const int32_t d = out.domain[b];
    if (d < 0 || static_cast<size_t>(d) >= out.domains.size() || !(out.positions[b] > 0) ||
        !std::isfinite(out.positions[b])) {
      return data_loss(where + ": block " + std::to_string(b) + ": expected a domain below " +
                       std::to_string(out.domains.size()) + " and positions above 0, found " + std::to_string(d) +
                       " and " + std::to_string(out.positions[b]));
    }
    ++blocks[static_cast<size_t>(d)];
  }
  for (size_t d = 0; d < blocks.size(); ++d) {
    if (blocks[d] == 0) return data_loss(where + ": domain '" + out.domains[d] + "' has no block");
  }
  for (size_t i = 0; i < out.slope.size(); ++i) {
    if (!std::isfinite(out.slope[i])) {
      return data_loss(where + ": array 'slope': expected finite numbers, found " + std::to_string(out.slope[i]) +
                       " at index " + std::to_string(i));
    }
  }
  ASSIGN_OR_RETURN(out.sha256, sha256_file_hex(path));
  return out;
}

Status write_block_slopes(const std::filesystem::path& path, const BlockSlopes& b, const Config& config) {
  std::map<std::string, std::string> metadata = b.metadata;
  metadata["schema"] = kBlocksSchema;
  metadata["domains"] = dump_json(Json(b.domains));
  const auto n = static_cast<int64_t>(b.domain.size());
  return write_safetensors(path,
                           {{"domain", {b.domain.data(), DType::kI32, {n}}},
                            {"positions", {b.positions.data(), DType::kF32, {n}}},
                            {"slope", {b.slope.data(), DType::kF32, {n, config.n_layers}}}},
                           metadata);
}

}  // namespace espalier
