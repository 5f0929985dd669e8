#include "format/safetensors.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "base/checked.h"
#include "format/json.h"
#include "format/safetensors_header.h"

namespace espalier {
namespace {

constexpr uint64_t kMaxHeaderBytes = uint64_t{1} << 30;
constexpr size_t kMaxDimensions = 16;

std::string quoted(std::string_view what) { return "'" + std::string(what) + "'"; }

Result<uint64_t> unsigned_field(const Json& value, const std::string& where) {
  if (!value.is_number_unsigned()) return data_loss(where + ": expected a non-negative integer");
  return value.get<uint64_t>();
}

Result<TensorEntry> parse_entry(const std::string& name, const Json& value, uint64_t data_start, uint64_t data_size,
                                const std::string& file) {
  const std::string where = file + ": tensor '" + name + "'";
  if (!value.is_object()) return data_loss(where + ": expected an object with dtype, shape and data_offsets");
  const auto dtype = value.find("dtype");
  const auto shape = value.find("shape");
  const auto offsets = value.find("data_offsets");
  if (dtype == value.end() || shape == value.end() || offsets == value.end() || value.size() != 3) {
    return data_loss(where + ": expected exactly the keys dtype, shape and data_offsets");
  }
  TensorEntry entry;
  entry.name = name;
  if (!dtype->is_string()) return data_loss(where + ": dtype is not a string");
  const auto known = dtype_from_name(dtype->get_ref<const std::string&>());
  if (!known) return data_loss(where + ": unknown dtype '" + dtype->get<std::string>() + "'");
  entry.dtype = *known;
  if (!shape->is_array() || shape->size() > kMaxDimensions) {
    return data_loss(where + ": shape is not an array of at most " + std::to_string(kMaxDimensions) + " dimensions");
  }
  uint64_t bytes = static_cast<uint64_t>(dtype_size_bytes(entry.dtype));
  bool overflow = false;
  for (const Json& d : *shape) {
    ASSIGN_OR_RETURN(const uint64_t dim, unsigned_field(d, where + ": shape"));
    if (dim > static_cast<uint64_t>(INT64_MAX)) overflow = true;
    const auto product = checked_mul(bytes, dim);
    overflow = overflow || !product;
    bytes = product.value_or(0);
    entry.shape.push_back(static_cast<int64_t>(dim));
  }
  if (overflow) return data_loss(where + ": shape " + shape_text(entry.shape) + " does not fit 64 bits");
  if (!offsets->is_array() || offsets->size() != 2) return data_loss(where + ": data_offsets is not a pair");
  ASSIGN_OR_RETURN(const uint64_t begin, unsigned_field((*offsets)[0], where + ": data_offsets"));
  ASSIGN_OR_RETURN(const uint64_t end, unsigned_field((*offsets)[1], where + ": data_offsets"));
  if (begin > end || end > data_size) {
    return data_loss(where + ": data_offsets [" + std::to_string(begin) + ", " + std::to_string(end) +
                     "] do not lie in the " + std::to_string(data_size) +
                     " data bytes of the file; it is truncated or damaged, fetch it again");
  }
  if (end - begin != bytes) {
    return data_loss(where + ": " + std::string(dtype_name(entry.dtype)) + " " + shape_text(entry.shape) + " needs " +
                     std::to_string(bytes) + " bytes, data_offsets hold " + std::to_string(end - begin));
  }
  entry.begin = data_start + begin;
  entry.end = data_start + end;
  return entry;
}

// The data must be covered exactly: no gap, no overlap, nothing left at the end.
Status check_coverage(const SafetensorsHeader& header, uint64_t data_start, uint64_t file_size,
                      const std::string& file) {
  uint64_t at = data_start;
  for (const TensorEntry& e : header.entries) {
    if (e.begin != at) {
      return data_loss(file + ": tensor '" + e.name + "' starts at byte " + std::to_string(e.begin) + ", expected " +
                       std::to_string(at) + (e.begin < at ? " (overlaps its predecessor)" : " (gap before it)"));
    }
    at = e.end;
  }
  if (at != file_size) {
    return data_loss(file + ": " + std::to_string(file_size) + " bytes on disk, the header describes " +
                     std::to_string(at) + "; the file is padded or damaged");
  }
  return ok_status();
}

}  // namespace

Result<SafetensorsHeader> parse_safetensors_header(std::span<const uint8_t> file_start, uint64_t file_size,
                                                   std::string_view what) {
  const std::string file = quoted(what);
  if (file_size < 8 || file_start.size() < 8) {
    return data_loss(file + ": " + std::to_string(file_size) + " bytes, a safetensors file has at least 8");
  }
  uint64_t header_size = 0;
  for (int i = 7; i >= 0; --i) header_size = header_size << 8 | file_start[static_cast<size_t>(i)];
  if (header_size > kMaxHeaderBytes || header_size > file_size - 8 || header_size > file_start.size() - 8) {
    return data_loss(file + ": header of " + std::to_string(header_size) + " bytes does not fit the file of " +
                     std::to_string(file_size) + " bytes; it is truncated or not a safetensors file");
  }
  const uint64_t data_start = 8 + header_size;
  std::string_view text(reinterpret_cast<const char*>(file_start.data()) + 8, header_size);
  if (text.empty() || text.front() != '{') return data_loss(file + ": header does not start with '{'");
  ASSIGN_OR_RETURN(const Json json, parse_json(text, file + ": header"));
  if (!json.is_object()) return data_loss(file + ": header is not an object");

  SafetensorsHeader header;
  header.entries.reserve(json.size());
  for (const auto& [name, value] : json.items()) {
    if (name == "__metadata__") {
      if (!value.is_object()) return data_loss(file + ": __metadata__ is not an object");
      for (const auto& [k, v] : value.items()) {
        if (!v.is_string()) return data_loss(file + ": __metadata__ '" + k + "' is not a string");
        header.metadata.emplace(k, v.get<std::string>());
      }
      continue;
    }
    if (name.empty()) return data_loss(file + ": a tensor has an empty name");
    ASSIGN_OR_RETURN(TensorEntry entry, parse_entry(name, value, data_start, file_size - data_start, file));
    header.entries.push_back(std::move(entry));
  }
  std::stable_sort(header.entries.begin(), header.entries.end(), [](const TensorEntry& a, const TensorEntry& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  RETURN_IF_ERROR(check_coverage(header, data_start, file_size, file));
  return header;
}

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
