#include "model/inventory.h"

#include <nlohmann/json.hpp>
#include <unordered_set>

#include "format/json.h"
#include "model/coverage.h"
#include "model/pack_metadata.h"

namespace espalier {
namespace {

struct Bits {
  double trellis = 0;
  double weights = 0;
  void add(double bits, double n) {
    trellis += bits * n;
    weights += n;
  }
  double mean() const { return weights > 0 ? trellis / weights : 0; }
};

const char* form_name(NativeForm form) {
  switch (form) {
    case NativeForm::kFp8:
      return "fp8";
    case NativeForm::kMxfp4:
      return "mxfp4";
    case NativeForm::kBf16:
      return "bf16";
    case NativeForm::kF32:
      return "f32";
  }
  return "other";
}

class Inventories {
 public:
  Inventories(const TensorIndex& index, const Config& config) : index_(index), config_(config) {}

  Result<Inventory> take() {
    ASSIGN_OR_RETURN(Coverage coverage, check_coverage(index_, config_));
    ASSIGN_OR_RETURN(PackMetadata metadata, check_pack_metadata(index_, config_, MetadataDepth::kDeclarations));
    out_.layout = metadata.layout;
    out_.missing = std::move(coverage.missing);
    out_.unexpected = std::move(coverage.unexpected);
    out_.notes = std::move(coverage.notes);
    out_.notes.insert(out_.notes.end(), metadata.notes.begin(), metadata.notes.end());
    out_.problems = std::move(metadata.problems);
    for (const auto& [name, count] : index_.missing_files()) out_.missing_files.push_back(name);
    out_.n_tensors = static_cast<int64_t>(index_.names().size());
    out_.bytes = index_.total_bytes();
    out_.n_files = static_cast<int64_t>(index_.files().size());
    count_matrices();
    count_rest();
    note_options_of_ours();
    out_.bpw_routed_stored = routed_.mean();
    out_.bpw_card = card_.mean();
    read_frequencies(metadata);
    return std::move(out_);
  }

 private:
  void use(const std::string& name, const std::string& part) {
    const TensorEntry* entry = index_.entry(name);
    if (entry != nullptr && used_.insert(entry).second) out_.bytes_by_part[part] += entry->size_bytes();
  }

  void count_matrices() {
    for (const MatrixSpec& m : all_matrices(config_)) {
      const std::string part(matrix_part(m, config_.n_layers));
      if (m.is_quantizable) ++out_.n_matrices;
      if (m.expert >= 0) out_.expert_bits[m.block].resize(static_cast<size_t>(m.expert) + 1);
      const std::string stem = exl3_stem(index_, m);
      if (!stem.empty()) {
        count_exl3(m, stem, part);
      } else if (const std::string name = native_name(m); index_.contains(name)) {
        ++out_.native[part][form_name(m.native)];
        use(name, part);
        use(name.substr(0, name.size() - 7) + ".scale", part);
      }
    }
  }

  void count_exl3(const MatrixSpec& m, const std::string& stem, const std::string& part) {
    for (const char* suffix : {".trellis", ".suh", ".svh", ".su", ".sv", ".mul1", ".mcg"}) use(stem + suffix, part);
    ++out_.n_exl3;
    const int k2 = static_cast<int>(index_.entry(stem + ".trellis")->shape[2] / 8);
    ++out_.widths[part][k2];
    ++out_.widths_by_block[m.block][projection_name(m)][k2];
    const double weights = static_cast<double>(m.in) * static_cast<double>(m.out);
    if (m.expert >= 0) out_.expert_bits[m.block][static_cast<size_t>(m.expert)] += k2 / 2.0 / 3;
    if (part == "routed") routed_.add(k2 / 2.0, weights);
    if (part != "head" && part != "drafter") card_.add(k2 / 2.0, weights);
  }

  // What a pack may hold here and in few other readers.
  void note_options_of_ours() {
    int64_t half_steps = 0;
    for (const auto& [part, counts] : out_.widths) {
      for (const auto& [k2, count] : counts) half_steps += k2 % 2 == 1 ? count : 0;
    }
    if (half_steps > 0) {
      out_.notes.push_back(std::to_string(half_steps) + " matrices have half-step widths: ours only, besides exllamav3 1.6 with mul1");
    }
    const auto routed = out_.native.find("routed");
    if (out_.n_exl3 > 0 && routed != out_.native.end() && routed->second.count("mxfp4") != 0) {
      out_.notes.push_back(std::to_string(routed->second.at("mxfp4")) + " routed expert matrices are native MXFP4: ours only");
    }
  }

  void count_rest() {
    for (const TensorSpec& t : plain_tensors(config_)) {
      const bool is_table = t.name.find(".engram.embed.") != std::string::npos;
      use(t.name, is_table ? "engram tables" : t.name == "embed.weight" ? "embedding" : "other");
    }
    for (const std::string& name : index_.names()) use(name, "other");
  }

  // Mean width of what a token reads: experts weighted by the tokens that calibration routed to them (run.json), else what
  // the plan's budget states.
  void read_frequencies(const PackMetadata& metadata) {
    const Result<Json> run = read_json_file(index_.dir() / "run.json", 256u << 20);
    Bits read;
    if (run.ok() && run->is_object() && run->contains("coverage") && (*run)["coverage"].is_array()) {
      for (const Json& block : (*run)["coverage"]) add_reads(block, &read);
    }
    if (read.weights > 0 && routed_.weights > 0) {
      out_.bpw_routed_read = read.mean();
      out_.read_source = "run.json";
    } else if (metadata.plan && metadata.plan->read_bpw) {
      out_.bpw_routed_read = metadata.plan->read_bpw;
      out_.read_source = metadata.plan_file;
    }
  }

  void add_reads(const Json& block, Bits* read) const {
    if (!block.is_object() || !block.contains("block") || !block["block"].is_string()) return;
    if (!block.contains("expert_tokens") || !block["expert_tokens"].is_array()) return;
    const std::string name = block["block"].get<std::string>();
    for (const auto& [layer, bits] : out_.expert_bits) {
      if (layer >= config_.n_layers || block_prefix(config_, layer) != name + ".") continue;
      const Json& tokens = block["expert_tokens"];
      for (size_t e = 0; e < bits.size() && e < tokens.size(); ++e) {
        if (tokens[e].is_number()) read->add(bits[e], tokens[e].get<double>());
      }
    }
  }

  const TensorIndex& index_;
  const Config& config_;
  Inventory out_;
  std::unordered_set<const TensorEntry*> used_;
  Bits routed_, card_;
};

}  // namespace

Result<Inventory> take_inventory(const TensorIndex& index, const Config& config) {
  return Inventories(index, config).take();
}

Result<Inventory> take_inventory(const std::string& dir, const std::string& engram_dir) {
  ASSIGN_OR_RETURN(const Config config, load_config(dir));
  ASSIGN_OR_RETURN(const TensorIndex index, open_model_index(dir, engram_dir, true));
  return take_inventory(index, config);
}

}  // namespace espalier
