#include "stages/pack/verify.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/file.h"
#include "base/hash.h"
#include "codec/exl3_tensor.h"
#include "format/json.h"
#include "model/coverage.h"
#include "model/engram.h"
#include "model/pack_metadata.h"
#include "stages/pack/layout.h"
#include "stages/pack/manifest.h"
#include "stages/pack/pack.h"
#include "text/engram_map.h"
#include "text/tokenizer.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

template <typename T, typename IsBad>
int64_t first_where(const ConstView& view, IsBad is_bad) {
  const auto* p = static_cast<const uint8_t*>(view.data);
  const int64_t n = view.size();
  for (int64_t i = 0; i < n; ++i) {
    T value;
    std::memcpy(&value, p + i * static_cast<int64_t>(sizeof value), sizeof value);
    if (is_bad(value)) return i;
  }
  return -1;
}

class Verification {
 public:
  Verification(fs::path dir, fs::path engram_dir, Progress& progress, ThreadPool& pool)
      : dir_(std::move(dir)), engram_dir_(std::move(engram_dir)), progress_(progress), pool_(pool) {}

  Result<VerifyReport> run() {
    RETURN_IF_ERROR(manifest());
    const Result<Config> config = load_config(dir_.string());
    if (!take(config.status())) return std::move(report_);
    const Result<TensorIndex> index = open_model_index(dir_, engram_dir_, true);
    if (!take(index.status())) return std::move(report_);
    report_.n_tensors = static_cast<int64_t>(index->names().size());
    structure(*index, *config);
    const Result<PackMetadata> metadata = check_pack_metadata(*index, *config, MetadataDepth::kEverything);
    if (take(metadata.status())) {
      report_.layout = metadata->layout;
      append(metadata->problems, &report_.problems);
      append(metadata->notes, &report_.notes);
    }
    RETURN_IF_ERROR(data(*index, *config));
    tokens(*config);
    return std::move(report_);
  }

 private:
  static void append(const std::vector<std::string>& from, std::vector<std::string>* to) {
    to->insert(to->end(), from.begin(), from.end());
  }
  // Notes an error as a problem; true when there was none.
  bool take(const Status& status) {
    if (!status.ok()) report_.problems.push_back(status.message());
    return status.ok();
  }

  Status manifest() {
    std::error_code ec;
    if (!fs::exists(fs::symlink_status(dir_ / kManifestFile, ec))) {
      report_.notes.push_back("no " + std::string(kManifestFile) + ": the files' digests were not checked");
      return ok_status();
    }
    const Result<std::vector<std::string>> found = check_manifest(dir_, progress_, pool_);
    if (!found.ok() && found.error().code() == StatusCode::kCancelled) return found.error();
    if (take(found.status())) append(*found, &report_.problems);
    return ok_status();
  }

  void structure(const TensorIndex& index, const Config& config) {
    for (const auto& [name, count] : index.missing_files()) {
      report_.problems.push_back("'" + name + "' is missing; the index puts " + std::to_string(count) + " tensors there");
    }
    for (const std::string& line : index.unmapped()) {
      report_.problems.push_back(line + ": in the file and not in model.safetensors.index.json");
    }
    const Result<Coverage> coverage = check_coverage(index, config);
    if (!take(coverage.status())) return;
    for (const std::string& name : coverage->missing) report_.problems.push_back("tensor '" + name + "' is missing");
    for (const std::string& name : coverage->unexpected) {
      report_.problems.push_back("'" + index.file_of(name).filename().string() + "': tensor '" + name +
                                 "' is not explained by the config");
    }
    append(coverage->notes, &report_.notes);
  }

  Result<std::map<std::string, MatrixDigest>> digests() {
    std::map<std::string, MatrixDigest> out;
    std::error_code ec;
    if (!fs::exists(fs::symlink_status(dir_ / "matrices.jsonl", ec))) {
      if (report_.layout != Layout::kOfficial) {
        report_.notes.push_back("no matrices.jsonl: the matrices' digests were not checked");
      }
      return out;
    }
    ASSIGN_OR_RETURN(const std::string text, read_text_file(dir_ / "matrices.jsonl"));
    ASSIGN_OR_RETURN(const std::vector<MatrixDigest> lines, parse_matrix_digests(text, "matrices.jsonl"));
    for (const MatrixDigest& line : lines) {
      if (!out.emplace(line.name, line).second) return data_loss("matrices.jsonl: '" + line.name + "' is listed twice");
    }
    return out;
  }

  // Format and digest of one EXL3 matrix; empty when all is well.
  static std::string check_matrix(const TensorIndex& index, const std::string& stem, const MatrixDigest* digest) {
    const codec::TensorLookup find = [&](const std::string& name) { return index.find(name); };
    const codec::Exl3Parts parts = codec::find_exl3_parts(find, stem);
    const std::string where = "'" + index.file_of(stem + ".trellis").filename().string() + "': tensor '" + stem + "'";
    const Result<codec::Exl3View> view = codec::view_exl3(stem, parts);
    if (!view.ok() && view.error().code() != StatusCode::kUnimplemented) {
      return "'" + index.file_of(stem + ".trellis").filename().string() + "': " + view.error().message();
    }
    if (digest == nullptr || !parts.suh || !parts.svh) return "";
    Sha256 hash;
    for (const auto* part : {&parts.trellis, &parts.suh, &parts.svh}) hash.update((*part)->bytes());
    if (hash.finish_hex() != digest->sha256) return where + ": its bytes are not those that were encoded (matrices.jsonl)";
    if (parts.trellis->shape[2] != 8 * digest->k2) {
      return where + ": width " + std::to_string(parts.trellis->shape[2] / 16.0) + ", encoded with " +
             std::to_string(digest->k2 / 2.0);
    }
    return "";
  }

  Status data(const TensorIndex& index, const Config& config) {
    Result<std::map<std::string, MatrixDigest>> listed = digests();
    if (!take(listed.status())) listed = std::map<std::string, MatrixDigest>();
    std::vector<std::string> stems;
    for (const MatrixSpec& spec : all_matrices(config)) {
      const std::string stem = exl3_stem(index, spec);
      if (!stem.empty()) stems.push_back(stem);
    }
    std::vector<std::string> plain;
    for (const std::string& name : index.names()) {
      if (!is_exl3_part(name)) plain.push_back(name);
    }
    const auto n_stems = static_cast<int64_t>(stems.size());
    const int64_t n = n_stems + static_cast<int64_t>(plain.size());
    std::vector<std::string> found(static_cast<size_t>(n));
    std::vector<uint8_t> has_digest(stems.size());
    progress_.begin("tensors", n);
    pool_.parallel_for(n, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (progress_.is_cancelled()) return;
        std::string& line = found[static_cast<size_t>(i)];
        if (i < n_stems) {
          const std::string& stem = stems[static_cast<size_t>(i)];
          const auto it = listed->find(canonical_stem(stem));
          has_digest[static_cast<size_t>(i)] = it != listed->end();
          line = check_matrix(index, stem, it == listed->end() ? nullptr : &it->second);
        } else {
          line = check_plain(index, plain[static_cast<size_t>(i - n_stems)]);
        }
        progress_.advance(1);
      }
    });
    if (progress_.is_cancelled()) return cancelled("stopped while reading tensors");
    std::erase(found, "");
    append(found, &report_.problems);
    report_.n_matrices = n_stems;
    report_.n_digests = std::count(has_digest.begin(), has_digest.end(), uint8_t{1});
    if (listed->empty()) return ok_status();
    std::set<std::string> present;
    for (size_t i = 0; i < stems.size(); ++i) {
      present.insert(canonical_stem(stems[i]));
      if (has_digest[i] == 0) report_.problems.push_back("matrices.jsonl does not list '" + stems[i] + "'");
    }
    for (const auto& [name, digest] : *listed) {
      if (present.count(name) == 0) {
        report_.problems.push_back("matrices.jsonl lists '" + name + "', which is not in the shards");
      }
    }
    return ok_status();
  }

  static std::string canonical_stem(const std::string& stem) {
    const std::string name = canonical_name(stem + ".");
    return name.substr(0, name.size() - 1);
  }

  static std::string check_plain(const TensorIndex& index, const std::string& name) {
    const int64_t at = first_not_finite(*index.find(name));
    if (at < 0) return "";
    return "'" + index.file_of(name).filename().string() + "': tensor '" + name + "': element " + std::to_string(at) +
           " is NaN or infinite";
  }

  // Self-tests of what turns text into Engram rows: prime sums, and the number of token classes.
  void tokens(const Config& config) {
    const EngramConfig& engram = config.engram;
    if (engram.layers.empty()) return;
    take(make_engram_hashes(config).status());
    const Result<Tokenizer> tokenizer = Tokenizer::open((dir_ / "tokenizer.json").string());
    if (!take(tokenizer.status())) return;
    const Result<EngramMap> map = build_engram_map(*tokenizer);
    if (!take(map.status())) return;
    if (map->n_classes != engram.n_classes) {
      report_.problems.push_back("tokenizer.json: expected " + std::to_string(engram.n_classes) +
                                 " Engram token classes (engram_compressed_vocab_size), found " +
                                 std::to_string(map->n_classes));
    }
  }

  const fs::path dir_, engram_dir_;
  Progress& progress_;
  ThreadPool& pool_;
  VerifyReport report_;
};

}  // namespace

int64_t first_not_finite(const ConstView& view) {
  switch (view.dtype) {
    case DType::kF8E4M3:
      return first_where<uint8_t>(view, [](uint8_t v) { return (v & 0x7F) == 0x7F; });
    case DType::kF8E5M2:
      return first_where<uint8_t>(view, [](uint8_t v) { return (v & 0x7C) == 0x7C; });
    case DType::kF8E8M0:
      return first_where<uint8_t>(view, [](uint8_t v) { return v == 0xFF; });
    case DType::kF16:
      return first_where<uint16_t>(view, [](uint16_t v) { return (v & 0x7C00) == 0x7C00; });
    case DType::kBF16:
      return first_where<uint16_t>(view, [](uint16_t v) { return (v & 0x7F80) == 0x7F80; });
    case DType::kF32:
      return first_where<uint32_t>(view, [](uint32_t v) { return (v & 0x7F800000u) == 0x7F800000u; });
    case DType::kF64:
      return first_where<uint64_t>(view, [](uint64_t v) { return (v >> 52 & 0x7FF) == 0x7FF; });
    default:
      return -1;
  }
}

Result<std::vector<MatrixDigest>> parse_matrix_digests(std::string_view text, std::string_view what) {
  std::vector<MatrixDigest> out;
  int64_t number = 0;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const std::string where = std::string(what) + ": line " + std::to_string(++number);
    if (line.empty()) continue;
    ASSIGN_OR_RETURN(const Json json, parse_json(line, where));
    const auto has = [&](const char* key, bool (*is)(const Json&)) {
      return json.is_object() && json.contains(key) && is(json[key]);
    };
    const auto is_string = [](const Json& v) { return v.is_string(); };
    const auto is_width = [](const Json& v) { return v.is_number_unsigned() && v.get<uint64_t>() <= 16; };
    if (!has("name", is_string) || !has("sha256", is_string) || !has("k2", is_width)) {
      return data_loss(where + ": expected an object with name, k2 and sha256");
    }
    out.push_back({json["name"].get<std::string>(), json["k2"].get<int>(), json["sha256"].get<std::string>()});
  }
  return out;
}

Result<VerifyReport> verify_folder(const fs::path& dir, const fs::path& engram_dir, Progress& progress, ThreadPool& pool) {
  std::error_code ec;
  if (!fs::is_directory(dir, ec)) return not_found("'" + dir.string() + "' is not a folder");
  return Verification(dir, engram_dir, progress, pool).run();
}

}  // namespace espalier
