#include "stages/run_files.h"

#include <nlohmann/json.hpp>

#include "format/json.h"
#include "stages/run_record.h"

namespace espalier {
namespace {

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

std::string run_json(const MakePackOptions& options, const CalibrationFacts& data, const QuantizeReport& report,
                     const PackSummary& summary) {
  Json doc;
  doc["schema"] = "espalier-run-1";
  doc["tool"] = options.tool;
  doc["backend"] = kBackend;
  doc["layout"] = layout_name(options.layout);
  doc["inputs"] = {{"source_lock", "source.lock.json"},
                   {"calibration_sha256", data.sha256},
                   {"calibration_content_sha256", data.content_sha256},
                   {"calibration_rows", report.rows},
                   {"calibration_tokens", report.tokens}};
  if (!options.plan_sha256.empty()) doc["inputs"]["plan_sha256"] = options.plan_sha256;
  doc["options"] = options_json(options.quantize, options.rows);
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
  if (!report.probe_ids.empty()) {  // rows that streamed through native layers say nothing about the pack
    doc["self_check"] = {{"streamed_equals_plain_forward", true}, {"positions", report.probe_ids.size()}};
  }
  return dump_json(doc, 1) + "\n";
}

// The command line that makes this pack, as far as options differ from their defaults.
std::string command_line(const MakePackOptions& options) {
  const QuantizeOptions& q = options.quantize;
  std::string out = "espalier quantize CHECKPOINT";
  const auto add = [&](const std::string& flag, const std::string& value) { out += " " + flag + " " + value; };
  const auto bits = [](double b) { return dump_json(b == static_cast<int>(b) ? Json(static_cast<int>(b)) : Json(b)); };
  if (q.plan) add("--plan", "PLAN");
  if (q.bits > 0) add("--bits", bits(q.bits));
  if (q.dense_bits) add("--dense-bits", bits(*q.dense_bits));
  if (q.head_bits) add("--head-bits", bits(*q.head_bits));
  if (q.drafter_bits) add("--drafter-bits", bits(*q.drafter_bits));
  for (const std::string& name : q.keep_native) add("--keep-native", name);
  add("--data", "CALIBRATION");
  if (options.rows > 0) add("--rows", std::to_string(options.rows));
  if (options.layout != Layout::kExllamav3) add("--layout", std::string(layout_name(options.layout)));
  if (q.encode.codec.seed != 0) add("--seed", std::to_string(q.encode.codec.seed));
  if (q.encode.preset != codec::Preset::kFast) add("--preset", std::string(codec::preset_name(q.encode.preset)));
  if (q.stream == StreamFrom::kNative) add("--stream", "native");
  if (q.encode.w2_input == W2Input::kNative) add("--w2-input", "native");
  return out + " --out PACK";
}

// How to make and how to check this pack.
std::string reproduce_md(const MakePackOptions& options, const CalibrationFacts& data) {
  std::string out = "# How to make this pack again\n\n";
  out += "Made by " + options.tool + ". The bytes of this folder are a function of the inputs below, the options in `run.json` and the\n";
  out += "version of the program; they do not depend on the machine or on the number of threads.\n\n";
  out += "| input | identity |\n|---|---|\n";
  out += "| CHECKPOINT | every file by size and sha256 in `source.lock.json` |\n";
  out += "| CALIBRATION | sha256 `" + data.sha256 + "` |\n";
  if (!options.plan_sha256.empty()) out += "| PLAN | sha256 `" + options.plan_sha256 + "` |\n";
  out += "\n```\nespalier verify CHECKPOINT --lock source.lock.json\n" + command_line(options) + "\n```\n\n";
  out += "Options that are not on this line and differ from their defaults are in `run.json` under `options`.\n\n";
  out += "Checks:\n\n```\nsha256sum -c MANIFEST.sha256\nespalier verify PACK\n";
  out += "espalier verify PACK --rederive 20 --checkpoint CHECKPOINT --data CALIBRATION\n```\n\n";
  out += "The licence files of the checkpoint are in this folder; they hold for the pack as well.\n";
  return out;
}

}  // namespace

CalibrationFacts calibration_facts(const Dataset& data) { return {data.sha256, dataset_content_sha256(data.rows)}; }

std::vector<PackText> run_records(const MakePackOptions& options, const CalibrationFacts& data,
                                  const QuantizeReport& report, const PackSummary& summary) {
  std::string lines;
  for (const MatrixRecord& r : report.matrices) lines += matrix_line(r);
  return {{"matrices.jsonl", std::move(lines)},
          {"run.json", run_json(options, data, report, summary)},
          {"reproduce.md", reproduce_md(options, data)}};
}

}  // namespace espalier
