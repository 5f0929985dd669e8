#include "stages/predict_pack.h"

#include <algorithm>
#include <set>
#include <unordered_map>

#include "base/file.h"
#include "format/safetensors_header.h"
#include "model/coverage.h"
#include "model/folder.h"
#include "stages/provenance.h"
#include "stages/run_files.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;
using Declaration = SafetensorsWriter::Declaration;

struct Kind {
  std::string what;
  std::string reason;
};

// Why a tensor that is no matrix of the network keeps its form.
Kind plain_kind(const std::string& name) {
  const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
  if (is_ignored_name(name)) return {"vision tower", "not part of the text path"};
  if (has(".engram.embed.")) return {"Engram tables", "looked up row by row from disk, never multiplied"};
  if (has(".engram.")) return {"Engram gates", "a few thousand values that scale whole rows"};
  if (name == "embed.weight") return {"embedding", "looked up row by row, never multiplied"};
  if (has("markov_head.")) return {"Markov head", "a low-rank correction of the draft logits, read in full precision"};
  if (has("confidence_head.")) return {"confidence head", "one row that prices drafts"};
  if (has("ffn.gate.")) return {"routers", "a wrong expert costs more than the bits"};
  if (has(".hc_")) return {"mHC mixing", "fp32 coefficients of the residual streams"};
  if (has("weights_proj.")) return {"indexer weights", "32 rows that weigh the index heads"};
  if (has("attn_sink")) return {"attention sinks", "one value per head"};
  return {"norms", "vectors"};
}

class Prediction {
 public:
  Prediction(const MakePackOptions& options, const TensorIndex& index, const Config& config)
      : options_(options), index_(index), config_(config) {}

  Result<PackPrediction> run() {
    RETURN_IF_ERROR(check_widths(options_.quantize, config_));
    lay_out_tensors();
    const std::vector<PackFile> files = group_tensors(options_.layout, tensors_, config_.n_experts);
    for (const PackFile& file : files) RETURN_IF_ERROR(add_shard(file));
    ASSIGN_OR_RETURN(const PackSummary summary, summarise_tensors(tensors_, files));
    out_.bpw = summary.bpw;
    out_.tensor_bytes = summary.tensor_bytes;
    out_.n_tensors = summary.tensors;
    out_.n_matrices = summary.matrices;
    RETURN_IF_ERROR(add_texts(files, summary));
    RETURN_IF_ERROR(add_copies());
    add("MANIFEST.sha256", 0);
    uint64_t manifest = 0;
    for (const std::string& name : names_) manifest += name == "MANIFEST.sha256" ? 0 : 64 + 2 + name.size() + 1;
    out_.bytes += manifest;
    out_.n_files = static_cast<int64_t>(names_.size());
    return std::move(out_);
  }

 private:
  void add(const std::string& name, uint64_t bytes) {
    names_.push_back(name);
    out_.bytes += bytes;
  }

  void keep(const std::string& name, const Kind& kind) {
    const ConstView view = *index_.find(name);
    tensors_.push_back({name, view.dtype, view.shape});
    auto it = std::find_if(out_.native.begin(), out_.native.end(),
                           [&](const NativeGroup& g) { return g.what == kind.what && g.reason == kind.reason; });
    if (it == out_.native.end()) it = out_.native.insert(it, {kind.what, kind.reason});
    ++it->n_tensors;
    it->bytes += static_cast<uint64_t>(view.size_bytes());
  }

  void lay_out_tensors() {
    std::vector<NativeMatrix> native;
    const std::vector<MatrixSpec> quantized = quantized_matrices(options_.quantize, config_, &native);
    std::unordered_map<std::string, Kind> kinds;  // native tensors of matrices
    std::unordered_map<std::string, std::string> reasons;
    for (const NativeMatrix& n : native) reasons.emplace(n.stem, n.reason);
    for (const MatrixSpec& spec : all_matrices(config_)) {
      const auto reason = reasons.find(spec.stem);
      if (reason == reasons.end()) continue;
      for (const char* part : {".weight", ".scale"}) {
        kinds.emplace(module_stem(spec) + part, Kind{projection_name(spec), reason->second});
      }
    }
    const codec::Codebook codebook = options_.quantize.encode.codec.codebook;
    std::set<std::string> replaced;
    for (const MatrixSpec& spec : quantized) {
      const int k2 = width_of(options_.quantize, spec, config_.n_layers);
      ++out_.widths[std::string(matrix_part(spec, config_.n_layers))][k2];
      out_.weights += static_cast<double>(spec.in) * static_cast<double>(spec.out);
      for (const char* part : {".weight", ".scale"}) replaced.insert(module_stem(spec) + part);
      tensors_.push_back({spec.stem + ".trellis", DType::kI16, {spec.in / 16, spec.out / 16, 8 * k2}});
      tensors_.push_back({spec.stem + ".suh", DType::kF16, {spec.in}});
      tensors_.push_back({spec.stem + ".svh", DType::kF16, {spec.out}});
      if (codebook == codec::Codebook::kMul1) tensors_.push_back({spec.stem + ".mul1", DType::kI32, {}});
      if (codebook == codec::Codebook::kMcg) tensors_.push_back({spec.stem + ".mcg", DType::kI32, {}});
      records_.push_back(record_of(spec, k2));
    }
    for (const std::string& name : index_.names()) {
      if (replaced.count(name) != 0) continue;
      const auto kind = kinds.find(name);
      keep(name, kind == kinds.end() ? plain_kind(name) : kind->second);
    }
    native_ = std::move(native);
  }

  // A record with as many digits as real ones have.
  static MatrixRecord record_of(const MatrixSpec& spec, int k2) {
    MatrixRecord r;
    r.stem = spec.stem;
    r.in = spec.in;
    r.out = spec.out;
    r.k2 = k2;
    r.tokens = 1234;
    r.effective_tokens = spec.expert < 0 ? 1234 : 1234.123456789012;
    r.weight_sum = r.effective_tokens;
    r.diagonal_mean = 0.12345678901234567;
    r.diagonal_min = 0.012345678901234567;
    r.diagonal_max = 1.2345678901234567;
    r.prior_fraction = spec.expert < 0 ? 0 : 0.12345678901234567;
    r.hessian = "calibrated";
    r.damping = 0.012345678901234567;
    r.true_error = 0.0081234567890123456;
    r.relative_mse = 0.012345678901234567;
    r.weighted_error = 0.0081234567890123456;
    r.sha256 = std::string(64, '0');
    return r;
  }

  Status add_shard(const PackFile& file) {
    std::vector<Declaration> declared;
    for (const size_t i : file.tensors) declared.push_back(tensors_[i]);
    uint64_t data = 0;
    ASSIGN_OR_RETURN(const std::string header, safetensors_header(declared, {{"format", "pt"}}, file.name, &data));
    add(file.name, header.size() + data);
    return ok_status();
  }

  Status add_texts(const std::vector<PackFile>& files, const PackSummary& summary) {
    QuantizeReport report;
    CalibrationFacts calibration{std::string(64, '0'), std::string(64, '0')};
    if (!options_.data.empty()) {
      ASSIGN_OR_RETURN(Dataset data, load_dataset(options_.data));
      data.rows = spread_rows(data.rows, options_.rows);
      calibration = calibration_facts(data);
      report.rows = static_cast<int64_t>(data.rows.size());
      for (const DatasetRow& row : data.rows) {
        report.tokens += static_cast<int64_t>(row.ids.size());
        report.longest_row = std::max(report.longest_row, static_cast<int64_t>(row.ids.size()));
      }
    }
    ASSIGN_OR_RETURN(PackFacts facts, measure_facts(tensors_));
    facts.producer = options_.tool;
    facts.calibration_rows = report.rows;
    facts.calibration_cols = report.longest_row;
    ASSIGN_OR_RETURN(const std::string config, read_text_file(fs::path(options_.checkpoint) / "config.json", 64u << 20));
    ASSIGN_OR_RETURN(const std::vector<PackText> texts, describe_pack(options_.layout, config, facts, tensors_, files));
    for (const PackText& t : texts) add(t.name, t.text.size());
    report.matrices = records_;
    report.native = native_;
    for (int block = 0; block < config_.n_layers + config_.drafter.n_stages; ++block) {
      BlockCoverage c;
      c.prefix = block_prefix(config_, block);
      c.tokens = report.tokens;
      c.expert_tokens.assign(static_cast<size_t>(block < config_.n_layers ? config_.n_experts : config_.drafter.n_experts),
                             std::min<int64_t>(report.tokens, 1234));
      report.coverage.push_back(std::move(c));
    }
    for (const PackText& t : run_records(options_, calibration, report, summary)) add(t.name, t.text.size());
    return ok_status();
  }

  // Files that are copied, and the lock, whose digests have a fixed length.
  Status add_copies() {
    const fs::path source(options_.checkpoint);
    ASSIGN_OR_RETURN(const std::vector<std::string> side, list_side_files(source));
    std::error_code ec;
    for (const std::string& name : side) add(name, static_cast<uint64_t>(fs::file_size(source / name, ec)));
    ASSIGN_OR_RETURN(const std::vector<FileRecord> lock, lock_sizes(source));
    add("source.lock.json", source_lock_json(lock).size());
    return ok_status();
  }

  const MakePackOptions& options_;
  const TensorIndex& index_;
  const Config& config_;
  std::vector<Declaration> tensors_;
  std::vector<MatrixRecord> records_;
  std::vector<NativeMatrix> native_;
  std::vector<std::string> names_;
  PackPrediction out_;
};

}  // namespace

Result<PackPrediction> predict_pack(const MakePackOptions& options) {
  RETURN_IF_ERROR(check_options(options.quantize));
  ASSIGN_OR_RETURN(const Config config, load_config(options.checkpoint));
  ASSIGN_OR_RETURN(const TensorIndex index, open_model_index(options.checkpoint, options.engram_dir));
  RETURN_IF_ERROR(require_coverage(index, config).status());
  return Prediction(options, index, config).run();
}

}  // namespace espalier
