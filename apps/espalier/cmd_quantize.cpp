// espalier quantize: checkpoint + calibration set -> pack.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "apps/espalier/command.h"
#include "apps/espalier/encode_flags.h"
#include "base/file.h"
#include "base/hash.h"
#include "format/json.h"
#include "model/pack_plan.h"
#include "stages/make_pack.h"
#include "stages/predict_pack.h"

namespace espalier::app {
namespace {

struct Flags {
  std::string checkpoint, data, out, engram;
  std::string layout = "exllamav3";
  EncodeFlags encode;
  std::string plan, library, work_dir;
  bool resume = false;
  std::vector<std::string> keep_native;
  bool dry_run = false;
  double bits = 0;
  int64_t rows = 0;
};

Result<MakePackOptions> options_of(const Flags& flags, const CommonOptions& common) {
  if (flags.plan.empty() && flags.bits == 0) {
    return invalid_argument("expected --bits K or --plan P.json, found neither; see 'espalier quantize --help'");
  }
  if (!flags.dry_run && (flags.data.empty() || flags.out.empty())) {
    return invalid_argument("expected --data D and --out PACK, found only one or none of them; --dry-run needs neither");
  }
  MakePackOptions options;
  options.layout = *pack_layout_from_name(flags.layout);
  ASSIGN_OR_RETURN(options.checkpoint, resolve_model(flags.checkpoint));
  options.data = flags.data;
  options.out = flags.out;
  options.engram_dir = flags.engram;
  options.rows = flags.rows;
  options.tool = std::string("espalier ") + ESPALIER_VERSION;
  QuantizeOptions& q = options.quantize;
  if (!flags.plan.empty()) {
    ASSIGN_OR_RETURN(const std::string text, read_text_file(flags.plan, 256u << 20));
    ASSIGN_OR_RETURN(const Config config, load_config(options.checkpoint));
    ASSIGN_OR_RETURN(q.plan, parse_pack_plan(text, "'" + flags.plan + "'", config));
    options.plan_sha256 = sha256_hex(text);
  }
  q.keep_native = flags.keep_native;
  if (options.layout == Layout::kVllm && flags.plan.empty() && flags.keep_native.empty()) {
    // What the public engine of this layout reads in the checkpoint's own form.
    q.keep_native = {"attn.wkv", "attn.compressor.wkv", "attn.compressor.wgate", "attn.indexer.wq_b", "attn.indexer.wk", "engram.wkv"};
  }
  q.bits = flags.bits;
  RETURN_IF_ERROR(take_encode_flags(flags.encode, common, &q));
  options.library = flags.library;
  options.resume = flags.resume;
  options.work_dir = flags.work_dir;
  return options;
}

void print_text(const MakePackReport& report, const std::string& out, double seconds) {
  std::printf("%s\n  %.3f bits per weight, %lld matrices, %.2f MB, %.0f s\n", out.c_str(), report.bpw,
              static_cast<long long>(report.matrices), static_cast<double>(report.bytes) / 1e6, seconds);
  double sum = 0, worst = 0;
  const MatrixRecord* worst_record = nullptr;
  for (const MatrixRecord& r : report.details.matrices) {
    sum += r.true_error;
    if (r.true_error >= worst) {
      worst = r.true_error;
      worst_record = &r;
    }
  }
  if (worst_record != nullptr) {
    std::printf("  true error: mean %.5f, worst %.5f (%s)\n", sum / static_cast<double>(report.details.matrices.size()),
                worst, worst_record->stem.c_str());
  }
  size_t fallbacks = 0;
  for (const MatrixRecord& r : report.details.matrices) fallbacks += r.fallbacks.size();
  if (fallbacks > 0) std::printf("  %zu fallbacks, listed in run.json\n", fallbacks);
  size_t without = 0;
  for (const BlockCoverage& c : report.details.coverage) without += c.without_tokens.size();
  std::printf("  calibrated on %lld tokens in %lld rows; experts without tokens: %zu\n",
              static_cast<long long>(report.details.tokens), static_cast<long long>(report.details.rows), without);
}

Result<int> dry_run(const MakePackOptions& options, CommandContext& context) {
  ASSIGN_OR_RETURN(const PackPrediction p, predict_pack(options));
  if (context.common.json) {
    Json doc = {{"dry_run", true},        {"bpw", p.bpw},           {"bytes", p.bytes},
                {"tensor_bytes", p.tensor_bytes}, {"tensors", p.n_tensors}, {"matrices", p.n_matrices},
                {"files", p.n_files},     {"weights", p.weights},   {"seconds", 0}};
    for (const auto& [part, counts] : p.widths) {
      for (const auto& [k2, n] : counts) doc["widths"][part][width_text_of(k2)] = n;
    }
    doc["native"] = Json::array();
    for (const NativeGroup& g : p.native) {
      doc["native"].push_back({{"what", g.what}, {"reason", g.reason}, {"tensors", g.n_tensors}, {"bytes", g.bytes}});
    }
    print_json(dump_json(doc));
    return 0;
  }
  std::printf("would write %lld tensors in %lld files, %.2f MB; %.4f bits per weight, %lld matrices\n",
              static_cast<long long>(p.n_tensors), static_cast<long long>(p.n_files), static_cast<double>(p.bytes) / 1e6, p.bpw,
              static_cast<long long>(p.n_matrices));
  for (const auto& [part, counts] : p.widths) {
    std::printf("  %-10s", part.c_str());
    for (const auto& [k2, n] : counts) std::printf("  %s x %lld", width_text_of(k2).c_str(), static_cast<long long>(n));
    std::printf("\n");
  }
  std::printf("stays native:\n");
  for (const NativeGroup& g : p.native) {
    std::printf("  %-22s %12.2f MB in %6lld tensors: %s\n", g.what.c_str(), static_cast<double>(g.bytes) / 1e6,
                static_cast<long long>(g.n_tensors), g.reason.c_str());
  }
  return 0;
}

Result<int> run(const Flags& flags, CommandContext& context) {
  ASSIGN_OR_RETURN(const MakePackOptions options, options_of(flags, context.common));
  if (flags.dry_run) return dry_run(options, context);
  const auto start = std::chrono::steady_clock::now();
  ASSIGN_OR_RETURN(const MakePackReport report, make_pack(options, context.progress, context.pool));
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!context.common.json) {
    print_text(report, flags.out, seconds);
    return 0;
  }
  Json doc;
  doc["bpw"] = report.bpw;
  doc["bytes"] = report.bytes;
  doc["seconds"] = seconds;
  doc["matrices"] = report.matrices;
  doc["out"] = flags.out;
  doc["calibration"] = {
      {"rows", report.details.rows}, {"tokens", report.details.tokens}, {"draft_calls", report.details.draft_calls}};
  doc["fallbacks"] = Json::array();
  for (const MatrixRecord& r : report.details.matrices) {
    for (const codec::Fallback& f : r.fallbacks) doc["fallbacks"].push_back(r.stem + ": " + codec::fallback_text(f));
  }
  doc["experts_without_tokens"] = Json::array();
  for (const BlockCoverage& c : report.details.coverage) {
    for (int32_t e : c.without_tokens)
      doc["experts_without_tokens"].push_back(c.prefix + "ffn.experts." + std::to_string(e));
  }
  print_json(dump_json(doc));
  return 0;
}

}  // namespace

void add_quantize(CommandTable& table) {
  const auto flags = std::make_shared<Flags>();
  CLI::App* app = table.add("quantize", "Quantizes a checkpoint to EXL3, layer by layer, from a calibration set",
                            [flags](CommandContext& context) { return run(*flags, context); });
  app->add_option("checkpoint", flags->checkpoint, "Folder of the official checkpoint, or 'pocket'")->required();
  app->add_option("--bits", flags->bits, "Width of every quantized matrix: 1 to 8; with mul1 also 1.5, 2.5, 3.5");
  app->add_option("--plan", flags->plan, "Widths of single matrices (docs/formats/plan.md); --bits for what it leaves out");
  app->add_option("--keep-native", flags->keep_native, "Projections that are not quantized, such as attn.wkv")->allow_extra_args(false);
  app->add_flag("--dry-run", flags->dry_run, "Say what would be written, from headers alone");
  app->add_option("--data", flags->data, "Calibration set (JSON lines)");
  app->add_option("--out", flags->out, "Folder to make; must not exist");
  app->add_option("--rows", flags->rows, "Use at most so many rows, spread over the set; 0 = all")
      ->check(CLI::NonNegativeNumber);
  app->add_option("--engram", flags->engram, "Another folder that holds the Engram shards");
  app->add_option("--layout", flags->layout, "Layout of the pack")
      ->check(CLI::IsMember({"exllamav3", "vllm", "tensorfold"}));
  app->add_flag("--resume", flags->resume, "Go on where an interrupted run with the same inputs and options stopped");
  app->add_option("--work-dir", flags->work_dir, "Folder for the large scratch files; default: beside the output");
  app->add_option("--library", flags->library,
                  "Width library: matrices that are in it are taken, others added (needs --stream native --w2-input native)");
  add_encode_flags(app, &flags->encode);
}

}  // namespace espalier::app
