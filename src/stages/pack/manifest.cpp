#include "stages/pack/manifest.h"

#include <algorithm>
#include <set>

#include "base/file.h"
#include "base/hash.h"
#include "stages/pack/pack.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

bool is_hex(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

}  // namespace

bool is_inner_path(std::string_view name) {
  if (name.empty() || name.front() == '/' || name.find('\\') != std::string_view::npos ||
      name.find('\0') != std::string_view::npos) {
    return false;
  }
  for (size_t at = 0; at <= name.size();) {
    const size_t end = std::min(name.find('/', at), name.size());
    const std::string_view part = name.substr(at, end - at);
    if (part.empty() || part == "." || part == "..") return false;
    at = end + 1;
  }
  return true;
}

Result<std::vector<ManifestEntry>> parse_manifest(std::string_view text, std::string_view what) {
  std::vector<ManifestEntry> out;
  std::set<std::string> names;
  int64_t number = 0;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const std::string where = std::string(what) + ": line " + std::to_string(++number);
    const bool is_entry = line.size() > 66 && is_hex(line.substr(0, 64)) && line[64] == ' ' && (line[65] == ' ' || line[65] == '*');
    if (!is_entry) return data_loss(where + ": expected 64 hex digits, two spaces and a name");
    std::string name(line.substr(66));
    if (!is_inner_path(name)) return data_loss(where + ": expected the name of a file in this folder, found '" + name + "'");
    if (!names.insert(name).second) return data_loss(where + ": '" + name + "' is listed twice");
    out.push_back({std::string(line.substr(0, 64)), std::move(name)});
  }
  if (out.empty()) return data_loss(std::string(what) + ": expected at least one line, found an empty file");
  return out;
}

Result<std::vector<std::string>> check_manifest(const fs::path& dir, Progress& progress, ThreadPool& pool) {
  ASSIGN_OR_RETURN(const std::string text, read_text_file(dir / kManifestFile, 256u << 20));
  ASSIGN_OR_RETURN(const std::vector<ManifestEntry> entries, parse_manifest(text, kManifestFile));
  std::vector<std::string> found(entries.size());
  progress.begin("manifest", static_cast<int64_t>(entries.size()));
  pool.parallel_for(static_cast<int64_t>(entries.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (progress.is_cancelled()) return;
      const ManifestEntry& entry = entries[static_cast<size_t>(i)];
      const Result<std::string> digest = sha256_file_hex(dir / entry.name);
      if (!digest.ok()) {
        found[static_cast<size_t>(i)] = "'" + entry.name + "' is listed in the manifest and cannot be read: " + digest.error().message();
      } else if (*digest != entry.sha256) {
        found[static_cast<size_t>(i)] = "'" + entry.name + "': sha256 " + *digest + ", the manifest says " + entry.sha256;
      }
      progress.advance(1, entry.name);
    }
  });
  if (progress.is_cancelled()) return cancelled("stopped while hashing");
  std::erase(found, "");
  ASSIGN_OR_RETURN(const std::vector<std::string> present, list_files(dir, true));
  std::set<std::string> listed;
  for (const ManifestEntry& entry : entries) listed.insert(entry.name);
  for (const std::string& name : present) {
    if (name != kManifestFile && listed.count(name) == 0) found.push_back("'" + name + "' is not listed in the manifest");
  }
  return found;
}

}  // namespace espalier
