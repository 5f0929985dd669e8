#include "stages/pack/convert.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>

#include "base/file.h"
#include "base/hash.h"
#include "format/json.h"
#include "model/coverage.h"
#include "model/pack_metadata.h"
#include "stages/pack/pack.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;
using Declaration = SafetensorsWriter::Declaration;

constexpr const char* kRecords[] = {"source.lock.json", "run.json", "matrices.jsonl", "reproduce.md"};

// One tensor of the new pack and where its bytes are.
struct Source {
  ConstView view;
  fs::path file;           // holds it
  bool is_renamed = false;
};

class Conversion {
 public:
  Conversion(const ConvertOptions& options, const TensorIndex& index, const Config& config, Progress& progress)
      : options_(options), index_(index), config_(config), progress_(progress) {}

  Result<ConvertReport> run(const fs::path& dir) {
    ASSIGN_OR_RETURN(const Coverage coverage, require_coverage_but_tables());
    ASSIGN_OR_RETURN(const PackMetadata metadata, check_pack_metadata(index_, config_, MetadataDepth::kEverything));
    if (!metadata.problems.empty()) {
      return data_loss(options_.pack.string() + ": " + metadata.problems.front() +
                       "; side files and shards do not belong together, see 'espalier verify'");
    }
    report_.from = metadata.layout;
    if (metadata.layout == Layout::kOfficial) {
      return failed_precondition("'" + options_.pack.string() +
                                 "' is a checkpoint without EXL3 matrices; make a pack with 'espalier quantize'");
    }
    RETURN_IF_ERROR(collect());
    RETURN_IF_ERROR(add_missing_biases());
    const std::vector<PackFile> files = group_tensors(options_.layout, declarations_, config_.n_experts);
    progress_.begin("convert", static_cast<int64_t>(files.size()));
    for (const PackFile& file : files) {
      if (progress_.is_cancelled()) return cancelled("stopped while writing the pack");
      RETURN_IF_ERROR(put_file(dir, file));
      progress_.advance(1, file.name);
    }
    RETURN_IF_ERROR(put_texts(dir, files));
    add_layout_notes();
    ASSIGN_OR_RETURN(const PackSummary summary, summarise_tensors(declarations_, files));
    report_.bpw = summary.bpw;
    report_.matrices = summary.matrices;
    report_.tensors = summary.tensors;
    ASSIGN_OR_RETURN(report_.bytes, write_manifest(dir, progress_));
    return std::move(report_);
  }

 private:
  // A pack whose tables lie elsewhere can be converted without them.
  Result<Coverage> require_coverage_but_tables() {
    ASSIGN_OR_RETURN(Coverage coverage, check_coverage(index_, config_));
    const size_t before = coverage.missing.size();
    std::erase_if(coverage.missing, [](const std::string& name) { return is_engram_table(name); });
    if (!coverage.missing.empty() || !coverage.unexpected.empty()) return require_coverage(index_, config_);
    if (before > 0) report_.notes.push_back("the Engram tables are not in the pack; name their folder with --engram");
    return coverage;
  }

  // Native copies beside an EXL3 matrix, which readers ignore.
  std::set<std::string> redundant_copies() const {
    std::set<std::string> names;
    for (const MatrixSpec& spec : all_matrices(config_)) {
      if (exl3_stem(index_, spec).empty()) continue;
      const std::string native = native_name(spec);
      for (const std::string& name : {native, native.substr(0, native.size() - 7) + ".scale"}) {
        if (index_.contains(name)) names.insert(name);
      }
    }
    return names;
  }

  void add(const std::string& name, const ConstView& view, const fs::path& file, bool is_renamed) {
    declarations_.push_back({name, view.dtype, view.shape});
    sources_.push_back({view, file, is_renamed});
  }

  Status collect() {
    const std::set<std::string> redundant = redundant_copies();
    std::set<std::string> names;
    for (const std::string& name : index_.names()) {
      if (redundant.count(name) != 0) {
        report_.notes.push_back("'" + name + "' is left out: its EXL3 form is there");
        continue;
      }
      if (options_.leave_engram_tables && is_engram_table(name)) continue;
      const std::string to = canonical_name(name);
      if (!names.insert(to).second) {
        return data_loss(index_.file_of(name).string() + ": tensor '" + name + "': expected '" + to +
                         "' once, found it under two names");
      }
      add(to, *index_.find(name), index_.file_of(name), to != name);
    }
    if (options_.leave_engram_tables) report_.notes.push_back("the Engram tables stay where they are; name them with --engram");
    return ok_status();
  }

  Status add_missing_biases() {
    std::vector<std::string> absent;
    for (int block = 0; block < config_.n_layers + config_.drafter.n_stages; ++block) {
      const std::string stem = block_prefix(config_, block) + "ffn.gate.";
      if (!index_.contains(stem + "bias_vl")) absent.push_back(stem);
    }
    if (absent.empty()) return ok_status();
    const std::string count = std::to_string(absent.size());
    if (options_.checkpoint.empty()) {
      report_.notes.push_back(count + " image router biases (ffn.gate.bias_vl) are absent; --checkpoint adds them");
      return ok_status();
    }
    ASSIGN_OR_RETURN(const TensorIndex from, open_model_index(options_.checkpoint, "", true));
    for (const std::string& stem : absent) {
      ASSIGN_OR_RETURN(const ConstView theirs, from.get(stem + "bias"));
      ASSIGN_OR_RETURN(const ConstView ours, index_.get(stem + "bias"));
      if (theirs.dtype != ours.dtype || theirs.shape != ours.shape ||
          !std::equal(theirs.bytes().begin(), theirs.bytes().end(), ours.bytes().begin())) {
        return failed_precondition("'" + options_.checkpoint.string() + "': tensor '" + stem +
                                   "bias' is not the pack's; the pack was made from another snapshot");
      }
      ASSIGN_OR_RETURN(const ConstView bias, from.get(stem + "bias_vl", DType::kF32, ours.shape));
      bias_copies_.emplace_back(bias.bytes().begin(), bias.bytes().end());
      add(stem + "bias_vl", {bias_copies_.back().data(), bias.dtype, bias.shape}, from.file_of(stem + "bias_vl"), true);
    }
    report_.notes.push_back(count + " image router biases (ffn.gate.bias_vl) were taken from the checkpoint");
    return ok_status();
  }

  // The file of the source that holds exactly these tensors under these names; empty when there is none.
  fs::path same_file(const PackFile& file) const {
    const fs::path path = sources_[file.tensors.front()].file;
    for (const size_t i : file.tensors) {
      if (sources_[i].file != path || sources_[i].is_renamed) return {};
    }
    for (size_t f = 0; f < index_.files().size(); ++f) {
      if (index_.files()[f] == path && index_.file(f).entries().size() == file.tensors.size()) return path;
    }
    return {};
  }

  Status put_file(const fs::path& dir, const PackFile& file) {
    const fs::path same = same_file(file);
    if (!same.empty() && !options_.copy_files) {
      std::error_code ec;
      const fs::path real = fs::canonical(same, ec);  // of a symbolic link the file itself
      if (!ec) fs::create_hard_link(real, dir / file.name, ec);
      if (!ec) {
        ++report_.linked_files;
        return ok_status();
      }
    }
    ++report_.written_files;
    if (!same.empty()) return copy_whole_file(same, dir / file.name);
    std::vector<NamedView> views;
    for (const size_t i : file.tensors) views.push_back({declarations_[i].name, sources_[i].view});
    return write_safetensors(dir / file.name, views, {{"format", "pt"}});
  }

  Status put_texts(const fs::path& dir, const std::vector<PackFile>& files) {
    ASSIGN_OR_RETURN(const PackFacts stated, stated_facts(options_.pack, report_.from));
    ASSIGN_OR_RETURN(PackFacts facts, measure_facts(declarations_));
    facts.producer = stated.producer;
    facts.calibration_rows = stated.calibration_rows;
    facts.calibration_cols = stated.calibration_cols;
    facts.original_quantization_json = stated.original_quantization_json;
    ASSIGN_OR_RETURN(const std::string config, read_text_file(options_.pack / "config.json", 64u << 20));
    ASSIGN_OR_RETURN(const std::vector<PackText> texts, describe_pack(options_.layout, config, facts, declarations_, files));
    for (const PackText& t : texts) RETURN_IF_ERROR(write_text_file(dir / t.name, t.text));
    RETURN_IF_ERROR(copy_side_files(options_.pack, dir).status());
    std::error_code ec;
    for (const char* name : kRecords) {
      if (fs::is_regular_file(options_.pack / name, ec)) RETURN_IF_ERROR(copy_whole_file(options_.pack / name, dir / name));
    }
    return put_history(dir);
  }

  // convert.json: the way from the layout that was quantized to this one.
  Status put_history(const fs::path& dir) {
    Json doc = {{"schema", "espalier-convert-1"}, {"steps", Json::array()}};
    std::error_code ec;
    if (fs::is_regular_file(options_.pack / "convert.json", ec)) {
      ASSIGN_OR_RETURN(const Json before, read_json_file(options_.pack / "convert.json", 64u << 20));
      if (before.is_object() && before.contains("steps") && before["steps"].is_array()) doc["steps"] = before["steps"];
    }
    Json step = {{"from", layout_name(report_.from)}, {"to", layout_name(options_.layout)}, {"tool", options_.tool}};
    if (fs::is_regular_file(options_.pack / kManifestFile, ec)) {
      ASSIGN_OR_RETURN(const std::string digest, sha256_file_hex(options_.pack / kManifestFile));
      step["manifest_sha256"] = digest;
    }
    doc["steps"].push_back(std::move(step));
    return write_text_file(dir / "convert.json", dump_json(doc, 1) + "\n");
  }

  void add_layout_notes() {
    if (options_.layout != Layout::kVllm) return;
    for (const Declaration& t : declarations_) {
      if (t.name.ends_with("attn.wkv.trellis") && t.name.rfind("layers.", 0) == 0) {
        report_.notes.push_back(
            "attn.wkv, compressor, indexer or engram.wkv are EXL3 here; the public engine of this layout keeps them native");
        return;
      }
    }
  }

  const ConvertOptions& options_;
  const TensorIndex& index_;
  const Config& config_;
  Progress& progress_;
  std::vector<Declaration> declarations_;
  std::vector<Source> sources_;
  std::vector<std::vector<uint8_t>> bias_copies_;
  ConvertReport report_;
};

}  // namespace

Result<ConvertReport> convert_pack(const ConvertOptions& options, Progress& progress) {
  RETURN_IF_ERROR(check_new_folder(options.out, options.pack, "pack"));
  ASSIGN_OR_RETURN(const Config config, load_config(options.pack.string()));
  ASSIGN_OR_RETURN(const TensorIndex index, open_model_index(options.pack, options.engram_dir));
  ASSIGN_OR_RETURN(AtomicDirectory folder, AtomicDirectory::create(options.out));
  Result<ConvertReport> report = Conversion(options, index, config, progress).run(folder.partial_path());
  if (!report.ok()) {
    folder.discard();
    return report;
  }
  RETURN_IF_ERROR(folder.commit());
  return report;
}

Status regroup_shards(const fs::path& dir, Layout layout, const Config& config) {
  const fs::path made = dir / ".regrouped";
  std::error_code ec;
  fs::create_directory(made, ec);
  if (ec) return failed_precondition("cannot create '" + made.string() + "': " + ec.message());
  std::vector<fs::path> before;
  {
    ASSIGN_OR_RETURN(const TensorIndex index, TensorIndex::open(dir));
    before = index.files();
    std::vector<Declaration> tensors;
    for (const std::string& name : index.names()) {
      const ConstView view = *index.find(name);
      tensors.push_back({name, view.dtype, view.shape});
    }
    for (const PackFile& file : group_tensors(layout, tensors, config.n_experts)) {
      std::vector<NamedView> views;
      for (const size_t i : file.tensors) views.push_back({tensors[i].name, *index.find(tensors[i].name)});
      RETURN_IF_ERROR(write_safetensors(made / file.name, views, {{"format", "pt"}}));
    }
  }
  for (const fs::path& path : before) fs::remove(path, ec);
  ASSIGN_OR_RETURN(const std::vector<std::string> names, list_files(made, false));
  for (const std::string& name : names) {
    fs::rename(made / name, dir / name, ec);
    if (ec) return unavailable("cannot move '" + (made / name).string() + "': " + ec.message());
  }
  fs::remove(made, ec);
  return ok_status();
}

}  // namespace espalier
