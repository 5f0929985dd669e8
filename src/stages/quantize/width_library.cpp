#include "stages/quantize/width_library.h"

#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "base/file.h"
#include "base/hash.h"
#include "format/json.h"
#include "format/safetensors.h"
#include "stages/quantize/matrix_record.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

constexpr char kSchema[] = "espalier-library-1";
constexpr char kIndexFile[] = "library.json";

Result<std::map<std::string, MatrixRecord>> records_of(const SafetensorsFile& file) {
  const std::string where = "'" + file.path().string() + "'";
  const auto it = file.metadata().find("records");
  const auto schema = file.metadata().find("schema");
  if (it == file.metadata().end() || schema == file.metadata().end() || schema->second != kSchema) {
    return data_loss(where + ": expected a file of a width library (" + kSchema + "); remove it and build it again");
  }
  ASSIGN_OR_RETURN(const Json list, parse_json(it->second, where + ": records"));
  std::map<std::string, MatrixRecord> out;
  try {
    for (const Json& j : list) {
      MatrixRecord r = record_of(j);
      out[r.stem] = std::move(r);
    }
  } catch (const Json::exception&) {
    return data_loss(where + ": records are not of the form of " + kSchema + "; remove it and build it again");
  }
  return out;
}

Status take_words(const SafetensorsFile& file, const std::string& name, const Shape& shape, DType dtype,
                  std::vector<uint16_t>* out) {
  const TensorEntry* entry = file.find(name);
  const std::string where = "'" + file.path().string() + "': tensor '" + name + "'";
  if (entry == nullptr) return data_loss(where + " is missing; remove the file and build it again");
  if (entry->dtype != dtype || entry->shape != shape) {
    return data_loss(where + ": expected " + std::string(dtype_name(dtype)) + " " + shape_text(shape) + ", found " +
                     std::string(dtype_name(entry->dtype)) + " " + shape_text(entry->shape));
  }
  out->resize(static_cast<size_t>(n_elements(shape)));
  std::memcpy(out->data(), file.view(*entry).data, out->size() * sizeof(uint16_t));
  return ok_status();
}

Result<codec::Exl3Tensor> tensor_of(const SafetensorsFile& file, const MatrixRecord& r, codec::Codebook codebook) {
  codec::Exl3Tensor t;
  t.k = r.in;
  t.n = r.out;
  t.k2 = r.k2;
  t.codebook = codebook;
  RETURN_IF_ERROR(take_words(file, r.stem + ".trellis",
                             {r.in / codec::kTile, r.out / codec::kTile, codec::tile_words(r.k2)}, DType::kI16, &t.trellis));
  RETURN_IF_ERROR(take_words(file, r.stem + ".suh", {r.in}, DType::kF16, &t.suh));
  RETURN_IF_ERROR(take_words(file, r.stem + ".svh", {r.out}, DType::kF16, &t.svh));
  if (tensor_digest(t) != r.sha256) {
    return data_loss("'" + file.path().string() + "': '" + r.stem +
                     "': its bytes are not those that were encoded (sha256); remove the file and build it again");
  }
  return t;
}

// Calls visit(file, stems that it should hold) for every width of the specs.
template <typename Visit>
Status for_each_width(const std::vector<MatrixSpec>& specs, const std::vector<int>& k2, const Visit& visit) {
  std::set<std::pair<int, int>> files;
  for (size_t i = 0; i < specs.size(); ++i) files.emplace(specs[i].block, k2[i]);
  for (const auto& [block, width] : files) {
    std::set<std::string> stems;
    for (size_t i = 0; i < specs.size(); ++i) {
      if (specs[i].block == block && k2[i] == width) stems.insert(specs[i].stem);
    }
    RETURN_IF_ERROR(visit(block, width, stems));
  }
  return ok_status();
}

}  // namespace

Result<WidthLibrary> WidthLibrary::open(const fs::path& dir, const std::map<std::string, std::string>& key,
                                        codec::Codebook codebook) {
  std::error_code error;
  fs::create_directory(dir, error);
  if (!fs::is_directory(dir)) {
    return failed_precondition("library '" + dir.string() + "': expected a folder, or a place in a folder that exists");
  }
  Json doc = {{"schema", kSchema}};
  for (const auto& [name, value] : key) doc["key"][name] = value;
  const fs::path index = dir / kIndexFile;
  if (!fs::exists(index)) {
    RETURN_IF_ERROR(write_text_file(index, dump_json(doc, 1) + "\n"));
    return WidthLibrary(dir, codebook);
  }
  ASSIGN_OR_RETURN(const Json found, read_json_file(index));
  const auto same = [](const Json& object, const char* name) {
    return object.is_object() && object.contains(name) ? object.at(name) : Json();
  };
  if (same(found, "schema") != Json(kSchema)) {
    return data_loss("'" + index.string() + "': expected schema " + kSchema + ", found " + dump_json(same(found, "schema")));
  }
  const Json old = same(found, "key");
  for (const auto& [name, value] : key) {
    const Json other = same(old, name.c_str());
    if (other != Json(value)) {
      return failed_precondition("library '" + dir.string() + "' was built with " + name + " = " +
                                 (other.is_string() ? other.get<std::string>() : "nothing") + ", this run has " + value + "; use the same, or another folder");
    }
  }
  if (old.size() != key.size()) {
    return failed_precondition("library '" + dir.string() + "' was built by another version of the program; use another folder");
  }
  return WidthLibrary(dir, codebook);
}

fs::path WidthLibrary::file_of(int block, int k2) const {
  char name[64];
  std::snprintf(name, sizeof name, "block-%04d-k2-%02d.safetensors", block, k2);
  return dir_ / (block < 0 ? "root-k2-" + std::to_string(k2) + ".safetensors" : name);
}

Result<std::map<std::string, WidthLibrary::Entry>> WidthLibrary::find(const std::vector<MatrixSpec>& specs,
                                                                      const std::vector<int>& k2) const {
  std::map<std::string, Entry> out;
  RETURN_IF_ERROR(for_each_width(specs, k2, [&](int block, int width, const std::set<std::string>& stems) -> Status {
    if (!fs::exists(file_of(block, width))) return ok_status();
    ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::open(file_of(block, width)));
    ASSIGN_OR_RETURN(auto records, records_of(file));
    for (auto& [stem, record] : records) {
      if (stems.count(stem) == 0) continue;
      ASSIGN_OR_RETURN(codec::Exl3Tensor tensor, tensor_of(file, record, codebook_));
      out[stem] = {std::move(record), std::move(tensor)};
    }
    return ok_status();
  }));
  return out;
}

Result<bool> WidthLibrary::has_all(const std::vector<MatrixSpec>& specs, const std::vector<int>& k2) const {
  bool all = true;
  RETURN_IF_ERROR(for_each_width(specs, k2, [&](int block, int width, const std::set<std::string>& stems) -> Status {
    if (!all) return ok_status();
    if (!fs::exists(file_of(block, width))) {
      all = false;
      return ok_status();
    }
    ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::open(file_of(block, width)));
    for (const std::string& stem : stems) all = all && file.find(stem + ".trellis") != nullptr;
    return ok_status();
  }));
  return all;
}

Result<std::optional<double>> WidthLibrary::errors_of(const MatrixSpec& spec, int k2) const {
  std::optional<double> out;
  const fs::path path = file_of(spec.block, k2);
  if (!errors_.count(path.string())) {
    std::map<std::string, double>& errors = errors_[path.string()];
    if (fs::exists(path)) {
      ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::open(path));
      ASSIGN_OR_RETURN(const auto records, records_of(file));
      for (const auto& [stem, record] : records) errors[stem] = record.true_error;
    }
  }
  const std::map<std::string, double>& errors = errors_[path.string()];
  const auto it = errors.find(spec.stem);
  if (it != errors.end()) out = it->second;
  return out;
}

Status WidthLibrary::add(int block, int k2, const std::vector<Entry>& entries) {
  std::map<std::string, Entry> all;
  const fs::path path = file_of(block, k2);
  if (fs::exists(path)) {
    ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::open(path));
    ASSIGN_OR_RETURN(auto records, records_of(file));
    for (auto& [stem, record] : records) {
      ASSIGN_OR_RETURN(codec::Exl3Tensor tensor, tensor_of(file, record, codebook_));
      all[stem] = {std::move(record), std::move(tensor)};
    }
  }
  for (const Entry& e : entries) all.emplace(e.record.stem, e);
  std::vector<NamedView> tensors;
  Json records = Json::array();
  for (const auto& [stem, e] : all) {
    const codec::Exl3Tensor& t = e.tensor;
    tensors.push_back({stem + ".trellis",
                       {t.trellis.data(), DType::kI16, {t.k / codec::kTile, t.n / codec::kTile, codec::tile_words(t.k2)}}});
    tensors.push_back({stem + ".suh", {t.suh.data(), DType::kF16, {t.k}}});
    tensors.push_back({stem + ".svh", {t.svh.data(), DType::kF16, {t.n}}});
    records.push_back(record_json(e.record));
  }
  return write_safetensors(path, tensors, {{"schema", kSchema}, {"records", dump_json(records)}});
}

Result<std::optional<BlockCoverage>> WidthLibrary::coverage(int block) const {
  const fs::path path = dir_ / ("coverage-" + std::to_string(block) + ".json");
  std::optional<BlockCoverage> out;
  if (!fs::exists(path)) return out;
  ASSIGN_OR_RETURN(const Json j, read_json_file(path));
  try {
    out.emplace();
    out->prefix = j.at("prefix").get<std::string>();
    out->tokens = j.at("tokens").get<int64_t>();
    out->expert_tokens = j.at("expert_tokens").get<std::vector<int64_t>>();
    out->without_tokens = j.at("without_tokens").get<std::vector<int32_t>>();
  } catch (const Json::exception&) {
    return data_loss("'" + path.string() + "': expected the routed tokens of a block; remove it and build it again");
  }
  return out;
}

Status WidthLibrary::add_coverage(int block, const BlockCoverage& c) {
  const Json j = {{"prefix", c.prefix}, {"tokens", c.tokens}, {"expert_tokens", c.expert_tokens}, {"without_tokens", c.without_tokens}};
  return write_text_file(dir_ / ("coverage-" + std::to_string(block) + ".json"), dump_json(j) + "\n");
}

}  // namespace espalier
