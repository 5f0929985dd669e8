#include "stages/provenance.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "base/file.h"
#include "base/hash.h"
#include "format/json.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

bool is_shard(const std::string& name) {
  constexpr std::string_view kTail = ".safetensors";
  return name.size() > kTail.size() && name.compare(name.size() - kTail.size(), kTail.size(), kTail) == 0;
}

Result<std::vector<std::string>> model_files(const fs::path& dir) {
  std::vector<std::string> names;
  std::error_code ec;
  fs::directory_iterator it(dir, ec);
  for (; !ec && it != fs::directory_iterator(); it.increment(ec)) {
    const std::string name = it->path().filename().string();
    const bool wanted =
        is_shard(name) || name == "config.json" || name == "model.safetensors.index.json" || name == "tokenizer.json";
    std::error_code ignored;
    if (wanted && it->is_regular_file(ignored)) names.push_back(name);
  }
  if (ec) return not_found("cannot list '" + dir.string() + "': " + ec.message());
  std::sort(names.begin(), names.end());
  return names;
}

// Length word and JSON of a safetensors file; the whole file when it is shorter than it claims.
std::span<const uint8_t> header_bytes(std::span<const uint8_t> file) {
  if (file.size() < 8) return file;
  uint64_t n = 0;
  for (size_t i = 0; i < 8; ++i) n |= static_cast<uint64_t>(file[i]) << (8 * i);
  return n > file.size() - 8 ? file : file.first(static_cast<size_t>(n) + 8);
}

// progress null: sizes and headers alone.
Result<std::vector<std::string>> check_files(const fs::path& dir, const fs::path& engram_dir,
                                             const std::vector<FileRecord>& lock, Progress* progress) {
  std::vector<std::string> problems;
  std::set<std::string> locked;
  if (progress != nullptr) progress->begin("source lock", static_cast<int64_t>(lock.size()));
  for (const FileRecord& record : lock) {
    if (progress != nullptr && progress->is_cancelled()) return cancelled("stopped while hashing the checkpoint");
    locked.insert(record.name);
    std::error_code ec;
    const bool is_elsewhere = !fs::exists(dir / record.name, ec) && !engram_dir.empty();
    const Result<MappedFile> file = MappedFile::open((is_elsewhere ? engram_dir : dir) / record.name);
    const std::string where = "'" + record.name + "': ";
    if (!file.ok()) {
      problems.push_back(where + "is in the lock and cannot be read: " + file.error().message());
    } else if (file->bytes().size() != record.size_bytes) {
      problems.push_back(where + std::to_string(file->bytes().size()) + " bytes, the lock says " +
                         std::to_string(record.size_bytes));
    } else if (!record.header_sha256.empty() && sha256_hex(header_bytes(file->bytes())) != record.header_sha256) {
      problems.push_back(where + "its header is not the one that was locked");
    } else if (progress != nullptr && sha256_hex(file->bytes()) != record.sha256) {
      problems.push_back(where + "sha256 " + sha256_hex(file->bytes()) + ", the lock says " + record.sha256);
    }
    if (progress != nullptr) progress->advance(1, record.name);
  }
  ASSIGN_OR_RETURN(const std::vector<std::string> names, model_files(dir));
  for (const std::string& name : names) {
    if (locked.count(name) == 0) problems.push_back("'" + name + "' is not in the lock");
  }
  return problems;
}

}  // namespace

Result<std::vector<FileRecord>> lock_files(const fs::path& dir, Progress& progress) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, model_files(dir));
  std::vector<FileRecord> records;
  progress.begin("source lock", static_cast<int64_t>(names.size()));
  for (const std::string& name : names) {
    if (progress.is_cancelled()) return cancelled("stopped while hashing the checkpoint");
    ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(dir / name));
    FileRecord record;
    record.name = name;
    record.size_bytes = file.bytes().size();
    record.sha256 = sha256_hex(file.bytes());
    if (is_shard(name)) record.header_sha256 = sha256_hex(header_bytes(file.bytes()));
    records.push_back(std::move(record));
    progress.advance(1, name);
  }
  return records;
}

Result<std::vector<FileRecord>> lock_sizes(const fs::path& dir) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, model_files(dir));
  std::vector<FileRecord> records;
  const std::string zeros(64, '0');
  for (const std::string& name : names) {
    std::error_code ec;
    const auto size = static_cast<uint64_t>(fs::file_size(dir / name, ec));
    if (ec) return not_found("cannot read the size of '" + (dir / name).string() + "': " + ec.message());
    records.push_back({name, size, zeros, is_shard(name) ? zeros : ""});
  }
  return records;
}

std::string source_lock_json(const std::vector<FileRecord>& files) {
  Json doc;
  doc["schema"] = "espalier-source-lock-1";
  doc["files"] = Json::array();
  for (const FileRecord& f : files) {
    Json entry = {{"name", f.name}, {"size", f.size_bytes}, {"sha256", f.sha256}};
    if (!f.header_sha256.empty()) entry["header_sha256"] = f.header_sha256;
    doc["files"].push_back(std::move(entry));
  }
  return dump_json(doc, 1) + "\n";
}

Result<std::vector<FileRecord>> parse_source_lock(std::string_view json_text, std::string_view what) {
  const std::string where(what);
  ASSIGN_OR_RETURN(const Json json, parse_json(json_text, what));
  if (!json.is_object() || !json.contains("files") || !json["files"].is_array() || json["files"].empty()) {
    return data_loss(where + ": expected an object with a list 'files'");
  }
  std::vector<FileRecord> out;
  std::set<std::string> names;
  for (const Json& entry : json["files"]) {
    const auto text = [&](const char* key) {
      const auto it = entry.is_object() ? entry.find(key) : entry.end();
      return it != entry.end() && it->is_string() ? it->get<std::string>() : std::string();
    };
    FileRecord record;
    record.name = text("name");
    record.sha256 = text("sha256");
    record.header_sha256 = text("header_sha256");
    const std::string here = where + ": file " + std::to_string(out.size());
    if (record.name.empty() || record.name.find('/') != std::string::npos || record.name == "." || record.name == ".." ||
        record.name.find('\\') != std::string::npos || record.name.find('\0') != std::string::npos) {
      return data_loss(here + ": expected the name of a file in the checkpoint's folder, found '" + record.name + "'");
    }
    if (!names.insert(record.name).second) return data_loss(here + ": '" + record.name + "' is listed twice");
    const auto size = entry.find("size");
    if (record.sha256.size() != 64 || size == entry.end() || !size->is_number_unsigned()) {
      return data_loss(here + " ('" + record.name + "'): expected a size and 64 hex digits of sha256");
    }
    record.size_bytes = size->get<uint64_t>();
    out.push_back(std::move(record));
  }
  return out;
}

Result<std::vector<std::string>> check_source_lock(const fs::path& dir, const fs::path& engram_dir,
                                                   const std::vector<FileRecord>& lock, Progress& progress) {
  return check_files(dir, engram_dir, lock, &progress);
}

Result<std::vector<std::string>> check_source_headers(const fs::path& dir, const fs::path& engram_dir,
                                                      const std::vector<FileRecord>& lock) {
  return check_files(dir, engram_dir, lock, nullptr);
}

Result<std::string> model_identity(const fs::path& dir) {
  ASSIGN_OR_RETURN(const std::vector<std::string> names, model_files(dir));
  Sha256 hash;
  for (const std::string& name : names) {
    if (name == "model.safetensors.index.json" || name == "tokenizer.json") continue;
    ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(dir / name));
    hash.update(name + "\n" + std::to_string(file.bytes().size()) + "\n");
    hash.update(is_shard(name) ? header_bytes(file.bytes()) : file.bytes());
  }
  return hash.finish_hex();
}

}  // namespace espalier
