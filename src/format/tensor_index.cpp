#include "format/tensor_index.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "base/file.h"
#include "format/json_events.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

constexpr const char* kIndexName = "model.safetensors.index.json";

bool is_plain_file_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos &&
         name.find('\\') == std::string::npos && name.find('\0') == std::string::npos;
}

struct WeightMap {
  std::map<std::string, std::vector<std::string>> by_file;  // file name -> tensors that the map gives to it
  std::optional<uint64_t> total_size;
  size_t n_tensors = 0;
};

Status check_repeats(const WeightMap& map, const std::string& where) {
  std::vector<std::string_view> names;
  names.reserve(map.n_tensors);
  for (const auto& [file, tensors] : map.by_file) names.insert(names.end(), tensors.begin(), tensors.end());
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice == names.end()) return ok_status();
  return data_loss(where + ": key '" + std::string(twice->substr(0, 80)) + "' appears twice in one object");
}

Result<WeightMap> read_weight_map(const fs::path& path) {
  ASSIGN_OR_RETURN(const std::string text, read_text_file(path));
  const std::string where = "'" + path.string() + "'";
  constexpr const char* kExpected = "the name of a file in this folder";
  WeightMap map;
  std::string wrong;
  std::vector<std::string>* tensors = nullptr;  // of the file that the last entry named; most follow one another
  std::string file_of_tensors;
  const auto entry = [&](const std::string& tensor, const std::string& file) {
    if (!is_plain_file_name(file)) {
      if (wrong.empty()) wrong = "tensor '" + tensor + "': expected " + kExpected + ", found " + dump_json(file).substr(0, 120);
      return;
    }
    if (tensors == nullptr || file != file_of_tensors) {
      tensors = &map.by_file[file];
      file_of_tensors = file;
    }
    tensors->push_back(tensor);
    ++map.n_tensors;
  };
  ASSIGN_OR_RETURN(const Json json, parse_json_with_table(text, where, {"weight_map", "tensor", kExpected, entry}));
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object()) {
    return data_loss(where + ": expected an object with an object 'weight_map'");
  }
  if (!wrong.empty()) return data_loss(where + ": " + wrong);
  if (map.by_file.empty()) return data_loss(where + ": weight_map is empty");
  RETURN_IF_ERROR(check_repeats(map, where));
  if (const auto it = json.find("metadata"); it != json.end() && it->is_object()) {
    const auto size = it->find("total_size");
    if (size != it->end() && size->is_number_unsigned()) map.total_size = size->get<uint64_t>();
  }
  return map;
}

// Every name of the map, for files that hold tensors which it gives to nobody or to another file.
std::unordered_set<std::string_view> mapped_names(const WeightMap& map) {
  std::unordered_set<std::string_view> names;
  names.reserve(map.n_tensors);
  for (const auto& [file, tensors] : map.by_file) names.insert(tensors.begin(), tensors.end());
  return names;
}

std::string mapped_there(const std::vector<std::string>& tensors) {
  return std::string(kIndexName) + " puts " + std::to_string(tensors.size()) + " tensors there (first '" + tensors.front() + "')";
}

// A file (or a link to one) of that name; an error only for what can be neither opened nor called absent.
Result<bool> is_present(const fs::path& path) {
  std::error_code ec;
  const bool present = fs::exists(path, ec);
  if (ec == std::errc::too_many_symbolic_link_levels) {
    return data_loss("'" + path.string() + "' is a loop of symbolic links; put the file itself there");
  }
  return present;
}

Result<std::vector<fs::path>> shards_in(const fs::path& dir) {
  std::vector<fs::path> paths;
  std::error_code ec;
  fs::directory_iterator it(dir, ec);
  for (; !ec && it != fs::directory_iterator(); it.increment(ec)) {
    if (it->path().extension() == ".safetensors" && it->path().filename().string().front() != '.') {
      paths.push_back(it->path());
    }
  }
  if (ec) return not_found("cannot list '" + dir.string() + "': " + ec.message());
  std::sort(paths.begin(), paths.end());
  return paths;
}

}  // namespace

Result<TensorIndex> TensorIndex::open(const fs::path& dir, const std::vector<fs::path>& extra_dirs) {
  IndexOptions options;
  options.extra_dirs = extra_dirs;
  return open(dir, options);
}

Status TensorIndex::add_file(const fs::path& path) {
  ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::open(path));
  files_.push_back(std::make_unique<SafetensorsFile>(std::move(file)));
  paths_.push_back(path);
  return ok_status();
}

Status TensorIndex::add_tensor(size_t file, size_t entry) {
  const TensorEntry& e = files_[file]->entries()[entry];
  const auto [it, inserted] = by_name_.emplace(e.name, Place{file, entry});
  if (!inserted) {
    return data_loss("tensor '" + e.name + "' is in '" + paths_[it->second.file].string() + "' and in '" +
                     paths_[file].string() + "'; remove one of the files");
  }
  names_.push_back(e.name);
  total_bytes_ += e.size_bytes();
  return ok_status();
}

Result<TensorIndex> TensorIndex::open(const fs::path& dir, const IndexOptions& options) {
  std::error_code ec;
  if (!fs::is_directory(dir, ec)) return not_found("'" + dir.string() + "' is not a folder");
  for (const fs::path& extra : options.extra_dirs) {
    if (!fs::is_directory(extra, ec)) return not_found("'" + extra.string() + "' is not a folder");
  }
  TensorIndex index;
  index.dir_ = dir;
  const auto add_all = [&](const fs::path& path) -> Status {
    RETURN_IF_ERROR(index.add_file(path));
    const size_t f = index.files_.size() - 1;
    for (size_t i = 0; i < index.files_[f]->entries().size(); ++i) RETURN_IF_ERROR(index.add_tensor(f, i));
    return ok_status();
  };

  ASSIGN_OR_RETURN(const bool has_map, is_present(dir / kIndexName));
  if (!has_map) {
    ASSIGN_OR_RETURN(const std::vector<fs::path> paths, shards_in(dir));
    if (paths.empty()) return not_found("'" + dir.string() + "' holds no safetensors files");
    for (const fs::path& path : paths) RETURN_IF_ERROR(add_all(path));
    index.mapped_bytes_ = index.total_bytes_;
  } else {
    ASSIGN_OR_RETURN(const WeightMap map, read_weight_map(dir / kIndexName));
    index.declared_bytes_ = map.total_size;
    std::unordered_set<std::string_view> mapped;  // made when a file holds more than the map gives to it
    index.by_name_.reserve(map.n_tensors);
    index.names_.reserve(map.n_tensors);
    for (const auto& [name, tensors] : map.by_file) {
      fs::path found = dir / name;
      ASSIGN_OR_RETURN(bool present, is_present(found));
      for (size_t i = 0; !present && i < options.extra_dirs.size(); ++i) {
        found = options.extra_dirs[i] / name;
        ASSIGN_OR_RETURN(present, is_present(found));
      }
      if (!present) {
        if (options.allow_missing_files) {
          index.missing_files_.emplace_back(name, tensors.size());
          continue;
        }
        return not_found("'" + (dir / name).string() + "' is missing; " + mapped_there(tensors) +
                         "; fetch the file or name its folder with --engram");
      }
      if (const Status opened = index.add_file(found); !opened.ok()) {
        return Status(opened.code(), opened.message() + "; " + mapped_there(tensors));
      }
      const size_t f = index.files_.size() - 1;
      const SafetensorsFile& file = *index.files_[f];
      for (const std::string& tensor : tensors) {
        const TensorEntry* entry = file.find(tensor);
        if (entry == nullptr) {
          return data_loss("'" + found.string() + "' has no tensor '" + tensor + "', which " + kIndexName + " puts there");
        }
        RETURN_IF_ERROR(index.add_tensor(f, static_cast<size_t>(entry - file.entries().data())));
      }
      if (file.entries().size() == tensors.size()) continue;
      if (mapped.empty()) mapped = mapped_names(map);
      for (const TensorEntry& entry : file.entries()) {
        if (mapped.count(entry.name) == 0) index.unmapped_.push_back(name + ": " + entry.name);
      }
    }
    index.mapped_bytes_ = index.total_bytes_;
    for (const std::string& name : options.side_files) {
      ASSIGN_OR_RETURN(const bool present, is_present(dir / name));
      if (present && map.by_file.count(name) == 0) RETURN_IF_ERROR(add_all(dir / name));
    }
  }
  if (options.may_borrow) {
    for (const fs::path& extra : options.extra_dirs) RETURN_IF_ERROR(index.borrow_from(extra, options));
  }
  std::sort(index.names_.begin(), index.names_.end());
  std::sort(index.unmapped_.begin(), index.unmapped_.end());
  return index;
}

// Opens only files of `dir` that hold something wanted: by its own map when there is one.
Status TensorIndex::borrow_from(const fs::path& dir, const IndexOptions& options) {
  const auto wanted = [&](const std::string& name) { return !contains(name) && options.may_borrow(*this, name); };
  std::vector<fs::path> candidates;
  ASSIGN_OR_RETURN(const bool has_map, is_present(dir / kIndexName));
  if (has_map) {
    ASSIGN_OR_RETURN(const WeightMap map, read_weight_map(dir / kIndexName));
    for (const auto& [name, tensors] : map.by_file) {
      ASSIGN_OR_RETURN(const bool present, is_present(dir / name));
      if (present && std::any_of(tensors.begin(), tensors.end(), wanted)) candidates.push_back(dir / name);
    }
  } else {
    ASSIGN_OR_RETURN(candidates, shards_in(dir));
  }
  for (const fs::path& path : candidates) {
    if (std::find(paths_.begin(), paths_.end(), path) != paths_.end()) continue;  // opened through this folder's map
    RETURN_IF_ERROR(add_file(path));
    const size_t f = files_.size() - 1;
    bool used = false;
    for (size_t i = 0; i < files_[f]->entries().size(); ++i) {
      if (!wanted(files_[f]->entries()[i].name)) continue;
      RETURN_IF_ERROR(add_tensor(f, i));
      used = true;
    }
    if (!used) {
      files_.pop_back();
      paths_.pop_back();
    }
  }
  return ok_status();
}

std::optional<ConstView> TensorIndex::find(std::string_view name) const {
  const auto it = by_name_.find(name);
  if (it == by_name_.end()) return std::nullopt;
  const SafetensorsFile& file = *files_[it->second.file];
  return file.view(file.entries()[it->second.entry]);
}

const TensorEntry* TensorIndex::entry(std::string_view name) const {
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : &files_[it->second.file]->entries()[it->second.entry];
}

fs::path TensorIndex::file_of(std::string_view name) const {
  const auto it = by_name_.find(name);
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
