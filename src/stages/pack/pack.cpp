#include "stages/pack/pack.h"

#include <algorithm>
#include <set>

#include "base/file.h"
#include "base/hash.h"
#include "format/safetensors.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

bool ends_with(const std::string& text, std::string_view tail) {
  return text.size() >= tail.size() && text.compare(text.size() - tail.size(), tail.size(), tail) == 0;
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

// Headers of all shards: tensors, and files as indices into them.
struct Shards {
  std::vector<SafetensorsWriter::Declaration> tensors;
  std::vector<PackFile> files;
};

Result<Shards> read_headers(const fs::path& dir) {
  ASSIGN_OR_RETURN(const std::vector<fs::path> paths, shards_of(dir));
  Shards out;
  std::set<std::string> names;
  for (const fs::path& path : paths) {
    ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::open(path));
    out.files.push_back({path.filename().string(), {}});
    for (const TensorEntry& entry : file.entries()) {
      if (!names.insert(entry.name).second) return internal_error("tensor '" + entry.name + "' was written twice");
      out.files.back().tensors.push_back(out.tensors.size());
      out.tensors.push_back({entry.name, entry.dtype, entry.shape});
    }
  }
  return out;
}

}  // namespace

// Links to folders are not entered, so a loop of links cannot hold us here.
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

Status check_new_folder(const fs::path& out, const fs::path& source, const std::string& source_is) {
  std::error_code ec;
  if (out.empty()) return invalid_argument("--out: expected the name of a new folder, found an empty name");
  const fs::path from = fs::weakly_canonical(source, ec);
  const fs::path to = fs::weakly_canonical(out, ec);
  if (from == to) {
    return failed_precondition("output '" + out.string() + "' is the " + source_is + " itself; choose another name");
  }
  const fs::path inside = to.lexically_relative(from);
  if (!inside.empty() && *inside.begin() != "..") {
    return failed_precondition("output '" + out.string() + "' lies inside the " + source_is +
                               "'s folder; choose a place outside it");
  }
  if (fs::exists(fs::symlink_status(out, ec))) {
    return failed_precondition("output '" + out.string() + "' exists already; choose another name or remove it");
  }
  return ok_status();
}

Result<PackSummary> summarise_shards(const fs::path& dir) {
  ASSIGN_OR_RETURN(const Shards shards, read_headers(dir));
  return summarise_tensors(shards.tensors, shards.files);
}

Result<PackSummary> summarise_tensors(const std::vector<SafetensorsWriter::Declaration>& tensors,
                                      const std::vector<PackFile>& files) {
  PackSummary summary;
  double bits = 0;
  double weights = 0;
  for (const PackFile& file : files) {
    for (const size_t i : file.tensors) {
      const SafetensorsWriter::Declaration& t = tensors[i];
      ++summary.tensors;
      summary.tensor_bytes += static_cast<uint64_t>(n_elements(t.shape) * dtype_size_bytes(t.dtype));
      if (!ends_with(t.name, ".trellis")) continue;
      ASSIGN_OR_RETURN(const int64_t k2, trellis_width(t, file.name));
      ++summary.matrices;
      if (t.name.rfind("layers.", 0) != 0) continue;
      const double n = static_cast<double>(t.shape[0]) * static_cast<double>(t.shape[1]) * 256.0;
      weights += n;
      bits += n * static_cast<double>(k2) / 2;
    }
  }
  summary.bpw = weights > 0 ? bits / weights : 0;
  return summary;
}

Status write_pack_description(const fs::path& dir, const fs::path& source_dir, Layout layout, const PackFacts& facts) {
  ASSIGN_OR_RETURN(const Shards shards, read_headers(dir));
  ASSIGN_OR_RETURN(const std::string config, read_text_file(source_dir / "config.json", 64u << 20));
  ASSIGN_OR_RETURN(PackFacts all, measure_facts(shards.tensors));
  all.producer = facts.producer;
  all.calibration_rows = facts.calibration_rows;
  all.calibration_cols = facts.calibration_cols;
  all.original_quantization_json = facts.original_quantization_json;
  ASSIGN_OR_RETURN(const std::vector<PackText> texts, describe_pack(layout, config, all, shards.tensors, shards.files));
  for (const PackText& t : texts) RETURN_IF_ERROR(write_text_file(dir / t.name, t.text));
  return ok_status();
}

Status copy_whole_file(const fs::path& from, const fs::path& to) {
  ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(from));
  ASSIGN_OR_RETURN(AtomicFile out, AtomicFile::create(to));
  RETURN_IF_ERROR(out.write(file.bytes()));
  return out.commit();
}

Result<std::vector<std::string>> list_side_files(const fs::path& source_dir) {
  ASSIGN_OR_RETURN(std::vector<std::string> names, list_files(source_dir, false));
  std::erase_if(names, [](const std::string& name) { return !is_side_file(name); });
  std::error_code ec;
  if (fs::is_directory(source_dir / "encoding", ec)) {
    ASSIGN_OR_RETURN(const std::vector<std::string> inner, list_files(source_dir / "encoding", true));
    for (const std::string& name : inner) names.push_back("encoding/" + name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

Result<std::vector<std::string>> copy_side_files(const fs::path& source_dir, const fs::path& dir) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, list_side_files(source_dir));
  std::error_code ec;
  for (const std::string& name : names) {
    fs::create_directories((dir / name).parent_path(), ec);
    if (ec) return failed_precondition("cannot create the folder of '" + name + "': " + ec.message());
    RETURN_IF_ERROR(copy_whole_file(source_dir / name, dir / name));
  }
  return names;
}

Result<uint64_t> write_manifest(const fs::path& dir, Progress& progress) {
  ASSIGN_OR_RETURN(std::vector<std::string> names, list_files(dir, true));
  std::erase(names, kManifestFile);
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
  RETURN_IF_ERROR(write_text_file(dir / kManifestFile, text));
  return total + text.size();
}

}  // namespace espalier
