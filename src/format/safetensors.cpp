#include "format/safetensors.h"

#include <nlohmann/json.hpp>
#include <unordered_set>

#include "format/json.h"
#include "format/safetensors_header.h"

namespace espalier {
namespace {

std::string quoted(std::string_view what) { return "'" + std::string(what) + "'"; }

}  // namespace

SafetensorsFile::SafetensorsFile(MappedFile file, SafetensorsHeader header)
    : file_(std::move(file)), header_(std::move(header)) {
  for (size_t i = 0; i < header_.entries.size(); ++i) by_name_.emplace(header_.entries[i].name, i);
}

Result<SafetensorsFile> SafetensorsFile::open(const std::filesystem::path& path) {
  ASSIGN_OR_RETURN(MappedFile file, MappedFile::open(path));
  ASSIGN_OR_RETURN(SafetensorsHeader header,
                   parse_safetensors_header(file.bytes(), file.bytes().size(), path.string()));
  return SafetensorsFile(std::move(file), std::move(header));
}

const TensorEntry* SafetensorsFile::find(std::string_view name) const {
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : &header_.entries[it->second];
}

ConstView SafetensorsFile::view(const TensorEntry& entry) const {
  return {file_.bytes().data() + entry.begin, entry.dtype, entry.shape};
}

Result<ConstView> SafetensorsFile::get(std::string_view name) const {
  const TensorEntry* entry = find(name);
  if (entry == nullptr) {
    return not_found("'" + path().string() + "' has no tensor '" + std::string(name) + "'");
  }
  return view(*entry);
}

Result<std::string> safetensors_header(const std::vector<SafetensorsWriter::Declaration>& tensors,
                                       const std::map<std::string, std::string>& metadata, std::string_view what,
                                       uint64_t* data_bytes) {
  Json header = Json::object();
  if (!metadata.empty()) {
    Json m = Json::object();
    for (const auto& [k, v] : metadata) m[k] = v;
    header["__metadata__"] = std::move(m);
  }
  std::unordered_set<std::string> names;
  uint64_t at = 0;
  for (const SafetensorsWriter::Declaration& t : tensors) {
    if (t.name.empty() || t.name == "__metadata__" || !names.insert(t.name).second) {
      return invalid_argument(quoted(what) + ": tensor name '" + t.name + "' is empty, reserved or repeated");
    }
    const uint64_t bytes = static_cast<uint64_t>(n_elements(t.shape) * dtype_size_bytes(t.dtype));
    Json entry = {{"dtype", std::string(dtype_name(t.dtype))}, {"shape", t.shape}, {"data_offsets", {at, at + bytes}}};
    header.get_ref<Json::object_t&>().Container::emplace_back(t.name, std::move(entry));
    at += bytes;
  }
  std::string text = dump_json(header);
  text.append((8 - text.size() % 8) % 8, ' ');  // data starts at a multiple of eight, as the official writer does
  std::string size(8, '\0');
  for (size_t i = 0; i < 8; ++i) size[i] = static_cast<char>(text.size() >> (8 * i) & 0xFF);
  *data_bytes = at;
  return size + text;
}

Result<SafetensorsWriter> SafetensorsWriter::create(const std::filesystem::path& path,
                                                    const std::vector<Declaration>& tensors,
                                                    const std::map<std::string, std::string>& metadata) {
  uint64_t data_bytes = 0;
  ASSIGN_OR_RETURN(const std::string header, safetensors_header(tensors, metadata, path.string(), &data_bytes));
  ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::create(path));
  RETURN_IF_ERROR(file.write(header));
  return SafetensorsWriter(std::move(file), data_bytes);
}

Status SafetensorsWriter::write(std::span<const uint8_t> bytes) {
  RETURN_IF_ERROR(file_.write(bytes));
  written_ += bytes.size();
  return ok_status();
}

Status SafetensorsWriter::commit() {
  if (written_ != expected_) {
    return internal_error("safetensors writer: " + std::to_string(written_) + " data bytes written, " +
                          std::to_string(expected_) + " declared");
  }
  return file_.commit();
}

Status write_safetensors(const std::filesystem::path& path, const std::vector<NamedView>& tensors,
                         const std::map<std::string, std::string>& metadata) {
  std::vector<SafetensorsWriter::Declaration> declarations;
  declarations.reserve(tensors.size());
  for (const NamedView& t : tensors) declarations.push_back({t.name, t.view.dtype, t.view.shape});
  ASSIGN_OR_RETURN(SafetensorsWriter writer, SafetensorsWriter::create(path, declarations, metadata));
  for (const NamedView& t : tensors) RETURN_IF_ERROR(writer.write(t.view.bytes()));
  return writer.commit();
}

}  // namespace espalier
