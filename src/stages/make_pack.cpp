#include "stages/make_pack.h"

#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/log.h"
#include "format/json.h"
#include "model/dataset.h"
#include "model/forward.h"
#include "stages/pack/pack.h"
#include "stages/provenance.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

std::string matrix_line(const MatrixRecord& r) {
  Json line;
  line["name"] = r.stem;
  line["in"] = r.in;
  line["out"] = r.out;
  line["k2"] = r.k2;
  line["tokens"] = r.tokens;
  line["dropped_tokens"] = r.dropped_tokens;
  line["effective_tokens"] = r.effective_tokens;
  line["weight_sum"] = r.weight_sum;
  line["diagonal"] = {{"mean", r.diagonal_mean}, {"min", r.diagonal_min}, {"max", r.diagonal_max}};
  line["prior_fraction"] = r.prior_fraction;
  line["hessian"] = r.hessian;
  line["damping"] = r.damping;
  line["fallbacks"] = Json::array();
  for (const codec::Fallback& f : r.fallbacks) line["fallbacks"].push_back(f.reason);
  line["true_error"] = r.true_error;
  line["relative_mse"] = r.relative_mse;
  line["weighted_error"] = r.weighted_error;
  line["sha256"] = r.sha256;
  return dump_json(line) + "\n";
}

Json coverage_json(const std::vector<BlockCoverage>& coverage) {
  Json out = Json::array();
  for (const BlockCoverage& c : coverage) {
    out.push_back({{"block", c.prefix.substr(0, c.prefix.size() - 1)},
                   {"tokens", c.tokens},
                   {"expert_tokens", c.expert_tokens},
                   {"experts_without_tokens", c.without_tokens}});
  }
  return out;
}

// "layers.3" of "layers.3.attn.wq_a"; the whole name of a root matrix.
std::string layer_of(const std::string& stem) {
  const size_t first = stem.find('.');
  return first == std::string::npos ? stem : stem.substr(0, stem.find('.', first + 1));
}

Json encoder_json(const codec::QuantizeOptions& o) {
  const auto exponent = [](double e) { return e < 0 ? Json("default") : Json(e); };
  return {{"row_exponents", {o.scale_rule.row_weight, o.scale_rule.row_hessian}},
          {"column_exponent", exponent(o.scale_rule.column_weight)},
          {"normalise_blocks", o.scale_rule.normalise_blocks},
          {"two_sided", o.two_sided},
          {"spread_tiles", o.spread_tiles},
          {"cuts", o.n_cuts},
          {"descent_sweeps", o.descent_sweeps},
          {"refit_rounds", o.refit_rounds},
          {"draws", o.n_draws}};
}

// Everything that could not be used as it was: layer, tensor, reason, and how many channels from which index on.
Json fallbacks_json(const std::vector<MatrixRecord>& matrices) {
  Json out = Json::array();
  for (const MatrixRecord& r : matrices) {
    for (const codec::Fallback& f : r.fallbacks) {
      Json entry = {{"layer", layer_of(r.stem)}, {"tensor", r.stem}, {"reason", f.reason}};
      if (f.count > 0) entry["count"] = f.count;
      if (f.first >= 0) entry["first_index"] = f.first;
      out.push_back(std::move(entry));
    }
  }
  return out;
}

std::string run_json(const MakePackOptions& options, const Dataset& data, const QuantizeReport& report,
                     const PackSummary& summary) {
  const QuantizeOptions& q = options.quantize;
  const auto number = [](double bits) { return bits == std::floor(bits) ? Json(static_cast<int>(bits)) : Json(bits); };
  const auto width = [&](const std::optional<double>& bits) { return bits ? number(*bits) : Json(nullptr); };
  const auto prior = [](const std::optional<double>& n0) { return n0 ? Json(*n0) : Json("default"); };
  Json doc;
  doc["schema"] = "espalier-run-1";
  doc["tool"] = options.tool;
  doc["layout"] = "exllamav3";
  doc["inputs"] = {{"source_lock", "source.lock.json"},
                   {"calibration_sha256", data.sha256},
                   {"calibration_content_sha256", dataset_content_sha256(data.rows)},
                   {"calibration_rows", report.rows},
                   {"calibration_tokens", report.tokens}};
  doc["options"] = {{"bits", number(q.bits)},
                    {"dense_bits", width(q.dense_bits)},
                    {"head_bits", width(q.head_bits)},
                    {"drafter_bits", width(q.drafter_bits)},
                    {"codebook", codec::codebook_name(q.encode.codec.codebook)},
                    {"seed", q.encode.codec.seed},
                    {"damping", q.encode.damping ? Json(*q.encode.damping) : Json("by effective tokens")},
                    {"preset", codec::preset_name(q.encode.preset)},
                    {"encoder", encoder_json(q.encode.codec)},
                    {"shared_scales", q.encode.shared_scales},
                    {"output_metrics", q.encode.output_metrics ? "model" : "none"},
                    {"routing_exponent", q.encode.routing_exponent},
                    {"prior_tokens_w13", prior(q.encode.prior_w13)},
                    {"prior_tokens_w2", prior(q.encode.prior_w2)},
                    {"prior_sample", q.encode.prior_sample},
                    {"w2_input", q.encode.w2_input == W2Input::kNative ? "native" : "quantized"},
                    {"draft_stride", q.draft_stride},
                    {"numerics", numerics_name(q.numerics)},
                    {"rows", options.rows}};
  doc["result"] = {{"bpw", summary.bpw},
                   {"matrices", summary.matrices},
                   {"tensors", summary.tensors},
                   {"tensor_bytes", summary.tensor_bytes}};
  int64_t fallbacks = 0;
  for (const MatrixRecord& r : report.matrices) fallbacks += r.hessian != "calibrated" ? 1 : 0;
  doc["matrices_without_calibration"] = fallbacks;
  doc["fallbacks"] = fallbacks_json(report.matrices);
  doc["native_matrices"] = Json::array();
  for (const NativeMatrix& n : report.native)
    doc["native_matrices"].push_back({{"name", n.stem}, {"reason", n.reason}});
  doc["draft_calls"] = report.draft_calls;
  doc["coverage"] = coverage_json(report.coverage);
  doc["self_check"] = {{"streamed_equals_plain_forward", true}, {"positions", report.probe_ids.size()}};
  return dump_json(doc, 1) + "\n";
}

// The finished pack, read from disk as any user of it reads it, must compute the very logits that the stream ended
// with. A state that was lost or reset between two layers during conversion shows here and nowhere else.
Status check_streamed(const MakePackOptions& options, const fs::path& dir, const QuantizeReport& report,
                      ThreadPool& pool) {
  LoadOptions load;
  load.engram_dir = options.engram_dir;
  load.residency = WeightResidency::kStored;
  auto loaded = Model::load(dir.string(), load, pool);
  if (!loaded.ok()) return std::move(loaded).error().with_context("self-check of the finished pack");
  const std::shared_ptr<const Model> model = std::move(loaded).value();
  SequenceState state(model->config());
  ForwardOptions forward_options;
  forward_options.numerics = options.quantize.numerics;
  forward_options.all_logits = true;
  ASSIGN_OR_RETURN(const ForwardResult result, forward(*model, state, report.probe_ids, forward_options, pool));
  const Tensor& a = result.logits;
  const Tensor& b = report.probe_logits;
  if (a.shape() != b.shape() || std::memcmp(a.data(), b.data(), static_cast<size_t>(a.size_bytes())) != 0) {
    return internal_error(
        "self-check: the finished pack's logits differ from the calibration stream's; the pack was not published");
  }
  return ok_status();
}

Status build(const MakePackOptions& options, const WeightLoader& loader, const Dataset& data, const fs::path& dir,
             MakePackReport* report, Progress& progress, ThreadPool& pool) {
  ASSIGN_OR_RETURN(const std::vector<FileRecord> lock, lock_files(options.checkpoint, progress));
  RETURN_IF_ERROR(write_text_file(dir / "source.lock.json", source_lock_json(lock)));
  ASSIGN_OR_RETURN(report->details, quantize(loader, data.rows, options.quantize, dir, progress, pool));
  const QuantizeReport& details = report->details;
  for (const BlockCoverage& c : details.coverage) {
    if (c.without_tokens.empty()) continue;
    log(LogLevel::kWarning, c.prefix + "ffn: " + std::to_string(c.without_tokens.size()) + " of " +
                                std::to_string(c.expert_tokens.size()) +
                                " experts saw no calibration token; the layer's prior stands in");
  }

  ASSIGN_OR_RETURN(const PackSummary summary, summarise_shards(dir));
  PackFacts facts;
  facts.producer = options.tool;
  facts.codebook = std::string(codec::codebook_name(options.quantize.encode.codec.codebook));
  facts.bits = summary.bpw;
  for (const MatrixRecord& r : details.matrices) {
    if (r.stem == "head") facts.head_bits = r.k2 / 2.0;
    if (r.stem.rfind("mtp.", 0) == 0) facts.mtp_bits = r.k2 / 2.0;
  }
  facts.calibration_rows = details.rows;
  facts.calibration_cols = details.longest_row;
  RETURN_IF_ERROR(write_pack_description(dir, options.checkpoint, Layout::kExllamav3, facts));
  ASSIGN_OR_RETURN(const std::vector<std::string> side_files, copy_side_files(options.checkpoint, dir));
  RETURN_IF_ERROR(check_streamed(options, dir, details, pool));
  std::string lines;
  for (const MatrixRecord& r : details.matrices) lines += matrix_line(r);
  RETURN_IF_ERROR(write_text_file(dir / "matrices.jsonl", lines));
  RETURN_IF_ERROR(write_text_file(dir / "run.json", run_json(options, data, details, summary)));
  ASSIGN_OR_RETURN(report->bytes, write_manifest(dir, progress));
  report->bpw = summary.bpw;
  report->matrices = summary.matrices;
  if (progress.is_cancelled()) return cancelled("stopped before the pack was published");
  return ok_status();
}

}  // namespace

Result<MakePackReport> make_pack(const MakePackOptions& options, Progress& progress, ThreadPool& pool) {
  RETURN_IF_ERROR(check_options(options.quantize));
  RETURN_IF_ERROR(check_new_folder(options.out, options.checkpoint, "checkpoint"));
  // The cheap inputs first, so that a wrong one costs seconds.
  ASSIGN_OR_RETURN(Dataset data, load_dataset(options.data));
  LoadOptions load;
  load.engram_dir = options.engram_dir;
  ASSIGN_OR_RETURN(const WeightLoader loader, WeightLoader::open(options.checkpoint, load));
  RETURN_IF_ERROR(
      check_dataset_fits(data, loader.config().vocab, loader.config().max_positions, options.data.filename().string()));
  data.rows = spread_rows(data.rows, options.rows);

  ASSIGN_OR_RETURN(AtomicDirectory folder, AtomicDirectory::create(options.out));
  MakePackReport report;
  Status status = build(options, loader, data, folder.partial_path(), &report, progress, pool);
  if (!status.ok()) {
    folder.discard();
    return status;
  }
  RETURN_IF_ERROR(folder.commit());
  return report;
}

}  // namespace espalier
