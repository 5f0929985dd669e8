#include "stages/eval/sidecar.h"

#include <cstring>
#include <nlohmann/json.hpp>

#include "format/json.h"
#include "format/safetensors.h"

namespace espalier {
namespace {

template <typename T>
void put(std::vector<NamedView>& out, const char* name, const std::vector<T>& values) {
  if (!values.empty()) out.push_back({name, {values.data(), DTypeOf<T>::value, {static_cast<int64_t>(values.size())}}});
}

template <typename T>
Status take(const SafetensorsFile& file, const char* name, bool required, std::vector<T>& out) {
  const TensorEntry* entry = file.find(name);
  const std::string where = "sidecar '" + file.path().string() + "': ";
  if (entry == nullptr) return required ? data_loss(where + "array '" + name + "' is missing") : ok_status();
  if (entry->dtype != DTypeOf<T>::value || entry->shape.size() != 1) {
    return data_loss(where + "array '" + name + "': expected " + std::string(dtype_name(DTypeOf<T>::value)) +
                     " of one dimension, found " + std::string(dtype_name(entry->dtype)) + " " +
                     shape_text(entry->shape));
  }
  out.resize(static_cast<size_t>(entry->shape[0]));
  std::memcpy(out.data(), file.view(*entry).data, out.size() * sizeof(T));
  return ok_status();
}

}  // namespace

Status write_sidecar(const std::filesystem::path& path, const Sidecar& sidecar) {
  std::vector<NamedView> tensors;
  put(tensors, "row", sidecar.row);
  put(tensors, "position", sidecar.position);
  put(tensors, "domain", sidecar.domain);
  put(tensors, "kl", sidecar.kl);
  put(tensors, "nll_reference", sidecar.nll_reference);
  put(tensors, "nll_candidate", sidecar.nll_candidate);
  put(tensors, "confidence", sidecar.confidence);
  put(tensors, "same_top1", sidecar.same_top1);
  std::map<std::string, std::string> metadata = sidecar.metadata;
  metadata["schema"] = kSidecarSchema;
  metadata["domains"] = dump_json(Json(sidecar.domains));
  return write_safetensors(path, tensors, metadata);
}

Result<Sidecar> read_sidecar(const std::filesystem::path& path) {
  ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::open(path));
  const std::string where = "sidecar '" + path.string() + "': ";
  Sidecar out;
  out.metadata = file.metadata();
  if (out.metadata["schema"] != kSidecarSchema) {
    return data_loss(where + "expected schema " + kSidecarSchema + ", found '" + out.metadata["schema"] + "'");
  }
  ASSIGN_OR_RETURN(const Json domains, parse_json(out.metadata["domains"], where + "domains"));
  if (!domains.is_array()) return data_loss(where + "domains: expected an array of names");
  for (const Json& name : domains) {
    if (!name.is_string()) return data_loss(where + "domains: expected an array of names");
    out.domains.push_back(name.get<std::string>());
  }
  RETURN_IF_ERROR(take(file, "row", true, out.row));
  RETURN_IF_ERROR(take(file, "position", true, out.position));
  RETURN_IF_ERROR(take(file, "domain", true, out.domain));
  RETURN_IF_ERROR(take(file, "kl", false, out.kl));
  RETURN_IF_ERROR(take(file, "nll_reference", true, out.nll_reference));
  RETURN_IF_ERROR(take(file, "nll_candidate", false, out.nll_candidate));
  RETURN_IF_ERROR(take(file, "confidence", false, out.confidence));
  RETURN_IF_ERROR(take(file, "same_top1", false, out.same_top1));
  const size_t n = out.row.size();
  const bool pair = !out.kl.empty();
  const size_t n_pair = pair ? n : 0;
  if (out.position.size() != n || out.domain.size() != n || out.nll_reference.size() != n || out.kl.size() != n_pair ||
      out.nll_candidate.size() != n_pair || out.confidence.size() != n_pair || out.same_top1.size() != n_pair) {
    return data_loss(where + "the arrays have different lengths");
  }
  for (int32_t d : out.domain) {
    if (d < 0 || static_cast<size_t>(d) >= out.domains.size()) {
      return data_loss(where + "domain index " + std::to_string(d) + " is outside the " +
                       std::to_string(out.domains.size()) + " domains");
    }
  }
  return out;
}

}  // namespace espalier
