#include "format/tensor_index.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "format/json.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

constexpr const char* kIndexName = "model.safetensors.index.json";

bool is_plain_file_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos &&
         name.find('\\') == std::string::npos && name.find('\0') == std::string::npos;
}

// file name -> tensors that the map gives to it.
Result<std::map<std::string, std::vector<std::string>>> read_weight_map(const fs::path& path) {
  ASSIGN_OR_RETURN(const Json json, read_json_file(path));
  const std::string where = "'" + path.string() + "'";
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object()) {
    return data_loss(where + ": expected an object with an object 'weight_map'");
  }
  std::map<std::string, std::vector<std::string>> by_file;
  for (const auto& [tensor, file] : json["weight_map"].items()) {
    if (!file.is_string() || !is_plain_file_name(file.get_ref<const std::string&>())) {
      return data_loss(where + ": tensor '" + tensor + "': expected the name of a file in this folder, found " +
                       dump_json(file).substr(0, 120));
    }
    by_file[file.get<std::string>()].push_back(tensor);
  }
  if (by_file.empty()) return data_loss(where + ": weight_map is empty");
  return by_file;
}

}  // namespace

Result<TensorIndex> TensorIndex::open(const fs::path& dir, const std::vector<fs::path>& extra_dirs) {
  std::error_code ec;
  if (!fs::is_directory(dir, ec)) return not_found("'" + dir.string() + "' is not a folder");
  for (const fs::path& extra : extra_dirs) {
    if (!fs::is_directory(extra, ec)) return not_found("'" + extra.string() + "' is not a folder");
  }
  TensorIndex index;
  index.dir_ = dir;

  std::map<std::string, std::vector<std::string>> mapped;
  std::vector<std::pair<std::string, fs::path>> files;
  const bool has_index = fs::exists(dir / kIndexName, ec);
  if (has_index) {
    ASSIGN_OR_RETURN(mapped, read_weight_map(dir / kIndexName));
    for (const auto& [name, tensors] : mapped) {
      fs::path found = dir / name;
      for (size_t i = 0; !fs::exists(found, ec) && i < extra_dirs.size(); ++i) found = extra_dirs[i] / name;
      if (!fs::exists(found, ec)) {
        return not_found("'" + (dir / name).string() + "' is missing; " + kIndexName + " puts " +
                         std::to_string(tensors.size()) + " tensors there (first '" + tensors.front() +
                         "'); fetch the file or name its folder with --engram");
      }
      files.emplace_back(name, found);
    }
  } else {
    for (const auto& item : fs::directory_iterator(dir, ec)) {
      if (item.path().extension() == ".safetensors" && item.path().filename().string().front() != '.') {
        files.emplace_back(item.path().filename().string(), item.path());
      }
    }
    std::sort(files.begin(), files.end());
    if (files.empty()) return not_found("'" + dir.string() + "' holds no safetensors files");
  }

  for (const auto& [name, path] : files) {
    ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::open(path));
    index.files_.push_back(std::make_unique<SafetensorsFile>(std::move(file)));
    index.paths_.push_back(path);
    const SafetensorsFile& opened = *index.files_.back();
    const size_t f = index.files_.size() - 1;
    std::vector<size_t> wanted;
    if (has_index) {
      for (const std::string& tensor : mapped[name]) {
        const TensorEntry* entry = opened.find(tensor);
        if (entry == nullptr) {
          return data_loss("'" + path.string() + "' has no tensor '" + tensor + "', which " + kIndexName + " puts there");
        }
        wanted.push_back(static_cast<size_t>(entry - opened.entries().data()));
      }
    } else {
      for (size_t i = 0; i < opened.entries().size(); ++i) wanted.push_back(i);
    }
    for (size_t i : wanted) {
      const TensorEntry& entry = opened.entries()[i];
      const auto [it, inserted] = index.by_name_.emplace(entry.name, Place{f, i});
      if (!inserted) {
        return data_loss("tensor '" + entry.name + "' is in '" + index.paths_[it->second.file].string() + "' and in '" +
                         path.string() + "'; remove one of the files");
      }
      index.names_.push_back(entry.name);
      index.total_bytes_ += entry.size_bytes();
    }
  }
  std::sort(index.names_.begin(), index.names_.end());
  return index;
}

std::optional<ConstView> TensorIndex::find(std::string_view name) const {
  const auto it = by_name_.find(std::string(name));
  if (it == by_name_.end()) return std::nullopt;
  const SafetensorsFile& file = *files_[it->second.file];
  return file.view(file.entries()[it->second.entry]);
}

fs::path TensorIndex::file_of(std::string_view name) const {
  const auto it = by_name_.find(std::string(name));
  return it == by_name_.end() ? fs::path() : paths_[it->second.file];
}

Result<ConstView> TensorIndex::get(std::string_view name) const {
  if (auto view = find(name)) return *view;
  return not_found("'" + dir_.string() + "': tensor '" + std::string(name) +
                   "' is missing; the model is incomplete, fetch it again");
}

Result<ConstView> TensorIndex::get(std::string_view name, DType dtype, const Shape& shape) const {
  ASSIGN_OR_RETURN(const ConstView view, get(name));
  if (view.dtype != dtype || view.shape != shape) {
    return data_loss("'" + file_of(name).string() + "': tensor '" + std::string(name) + "': expected " +
                     std::string(dtype_name(dtype)) + " " + shape_text(shape) + ", found " +
                     std::string(dtype_name(view.dtype)) + " " + shape_text(view.shape) +
                     "; config.json and the weights do not belong together or the file is damaged");
  }
  return view;
}

}  // namespace espalier
