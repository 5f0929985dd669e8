// `espalier calibrate CKPT`: native routing, shares, read frequencies and the coverage of a data set.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "apps/espalier/command.h"
#include "format/json.h"
#include "model/calibration_memory.h"
#include "stages/calibrate_model.h"

namespace espalier::app {
namespace {

struct Flags {
  std::string checkpoint, data, out, engram, export_file;
  std::string numerics = "kvq";
  int64_t rows = 0, draft_stride = 8, min_experts = 3, min_tokens = 0;
  int export_layer = -1;
  double top_p = 0, memory_limit_gib = 0, routing_exponent = 2;
  bool dry_run = false, strict = false;
  std::vector<int64_t> tokens = {853'106, 1'406'759};
};

Result<CalibrateOptions> options_of(const Flags& flags) {
  CalibrateOptions o;
  ASSIGN_OR_RETURN(o.checkpoint, resolve_model(flags.checkpoint));
  if (flags.data.empty() && !flags.dry_run) return invalid_argument("expected --data D, found none; only --dry-run works without");
  if (flags.out.empty() && !flags.dry_run) return invalid_argument("expected --out STATS, found none; only --dry-run works without");
  if ((flags.export_layer >= 0) != !flags.export_file.empty())
    return invalid_argument("expected --export-layer L and --out-x F together, found one of them");
  o.data = flags.data;
  o.out = flags.out;
  o.engram_dir = flags.engram;
  o.rows = flags.rows;
  o.numerics = *numerics_from_name(flags.numerics);
  if (flags.top_p > 0) o.pruning = ExpertPruning{flags.top_p, flags.min_experts};
  o.draft_stride = flags.draft_stride;
  o.memory_limit = static_cast<uint64_t>(flags.memory_limit_gib * static_cast<double>(uint64_t{1} << 30));
  o.export_layer = flags.export_layer;
  o.export_file = flags.export_file;
  o.routing_exponent = flags.routing_exponent;
  o.tool = std::string("espalier ") + ESPALIER_VERSION;
  return o;
}

Json items_json(const std::vector<SizedItem>& items) {
  Json out = Json::object();
  for (const SizedItem& item : items) out[item.what] = item.bytes;
  return out;
}

Json to_json(const StreamArithmetic& a) {
  return {{"tokens", a.tokens},
          {"carried", items_json(a.carried)},
          {"spilled", items_json(a.spilled)},
          {"hessians", items_json(a.hessians)},
          {"tokens_per_expert", a.tokens_per_expert},
          {"thin_below", a.thin_below},
          {"gram_flop", a.gram_flop}};
}

Json to_json(const CalibrateEstimate& e) {
  return {{"limit_bytes", e.limit_bytes}, {"fixed_bytes", e.fixed_bytes}, {"state_bytes", e.state_bytes},
          {"peak_bytes", e.peak_bytes},   {"disk_bytes", e.disk_bytes},   {"passes", e.group_ends.size()},
          {"unpacked_experts", e.unpacked_experts}};
}

void print_items(const char* title, const std::vector<SizedItem>& items) {
  std::printf("  %s\n", title);
  for (const SizedItem& item : items) std::printf("    %-40s %12.3f GB\n", item.what.c_str(), item.bytes / 1e9);
}

void print_arithmetic(const StreamArithmetic& a) {
  std::printf("%lld tokens, streamed layer by layer\n", static_cast<long long>(a.tokens));
  print_items("carried between layers", a.carried);
  print_items("spilled per layer", a.spilled);
  print_items("Hessians, fp32", a.hessians);
  std::printf("    %.0f routed tokens per expert; below %.2f of that w1 and w3 have more inputs than tokens\n",
              a.tokens_per_expert, a.thin_below);
  std::printf("    %.2f PFLOP for the Hessians of all routed experts\n", a.gram_flop / 1e15);
}

void print_estimate(const CalibrateEstimate& e) {
  std::printf("%lld rows, %lld tokens: %.1f MB of memory at most (limit %.1f MB), %zu passes over the weights, %.1f MB on disk\n",
              static_cast<long long>(e.rows), static_cast<long long>(e.tokens), static_cast<double>(e.peak_bytes) / 1e6,
              static_cast<double>(e.limit_bytes) / 1e6, e.group_ends.size(), static_cast<double>(e.disk_bytes) / 1e6);
}

Result<int> dry_run(const Flags& flags, const CalibrateOptions& options, bool json) {
  ASSIGN_OR_RETURN(const Config config, load_config(options.checkpoint));
  std::optional<CalibrateEstimate> estimate;
  if (!flags.data.empty()) {
    ASSIGN_OR_RETURN(estimate, estimate_calibration(options));
  }
  std::vector<StreamArithmetic> tables;
  for (int64_t n : flags.tokens) tables.push_back(stream_arithmetic(config, n));
  if (json) {
    Json doc = {{"dry_run", true}, {"tokens", estimate ? Json(estimate->tokens) : Json(nullptr)},
                {"estimate", estimate ? to_json(*estimate) : Json(nullptr)}, {"streaming", Json::array()}};
    for (const StreamArithmetic& a : tables) doc["streaming"].push_back(to_json(a));
    print_json(dump_json(doc));
    return 0;
  }
  if (estimate) print_estimate(*estimate);
  for (const StreamArithmetic& a : tables) print_arithmetic(a);
  return 0;
}

void print_text(const CalibrateReport& r, const std::string& out, bool holds) {
  const CoverageAudit& c = r.coverage;
  std::printf("%s\n  %lld tokens in %lld rows, %lld draft calls, %zu passes over the weights\n", out.c_str(),
              static_cast<long long>(r.tokens), static_cast<long long>(r.rows), static_cast<long long>(r.draft_calls),
              r.estimate.group_ends.size());
  if (r.broken_sequences > 0) {
    std::printf("  %lld sequences with values that are not finite; %lld tokens left out\n",
                static_cast<long long>(r.broken_sequences), static_cast<long long>(r.dropped_tokens));
  }
  std::printf("  %lld experts: %.0f tokens each on average, %lld at least\n", static_cast<long long>(c.n_experts),
              c.mean_tokens, static_cast<long long>(c.fewest_tokens));
  std::printf("  without tokens: %zu\n", c.without_tokens.size());
  for (const std::string& name : c.without_tokens) std::printf("    %s\n", name.c_str());
  std::printf("  fewer tokens than inputs: %zu\n", c.thin.size());
  for (const ThinExpert& e : c.thin) {
    std::printf("    %s: %lld tokens%s\n", e.name.c_str(), static_cast<long long>(e.tokens),
                e.is_w2_thin ? ", w2 too" : "");
  }
  std::printf("  coverage %s\n", holds ? "holds" : "does not hold");
}

Result<int> run(const Flags& flags, CommandContext& context) {
  ASSIGN_OR_RETURN(const CalibrateOptions options, options_of(flags));
  if (flags.dry_run) return dry_run(flags, options, context.common.json);
  if (!flags.export_file.empty()) RETURN_IF_ERROR(check_output(flags.export_file, {flags.data}));
  const auto start = std::chrono::steady_clock::now();
  ASSIGN_OR_RETURN(const CalibrateReport r, calibrate(options, context.progress, context.pool));
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  ASSIGN_OR_RETURN(const Config config, load_config(options.checkpoint));
  const bool holds = r.coverage.holds(flags.min_tokens, config.d_model);
  if (context.common.json) {
    Json thin = Json::array();
    for (const ThinExpert& e : r.coverage.thin)
      thin.push_back({{"name", e.name}, {"tokens", e.tokens}, {"w2", e.is_w2_thin}});
    print_json(dump_json({{"tokens", r.tokens},
                          {"rows", r.rows},
                          {"domains", r.statistics.domains},
                          {"experts_without_tokens", r.coverage.without_tokens},
                          {"experts_below_width", thin},
                          {"fewest_tokens", r.coverage.fewest_tokens},
                          {"mean_tokens", r.coverage.mean_tokens},
                          {"coverage_holds", holds},
                          {"draft_calls", r.draft_calls},
                          {"dropped_tokens", r.dropped_tokens},
                          {"broken_sequences", r.broken_sequences},
                          {"estimate", to_json(r.estimate)},
                          {"routing_sha256", r.statistics.sha256},
                          {"seconds", seconds},
                          {"out", flags.out}}));
  } else {
    print_text(r, flags.out, holds);
  }
  return flags.strict && !holds ? 1 : 0;
}

}  // namespace

void add_calibrate(CommandTable& table) {
  const auto flags = std::make_shared<Flags>();
  CLI::App* app = table.add("calibrate", "Native routing, shares, read frequencies and coverage of a data set",
                            [flags](CommandContext& context) { return run(*flags, context); });
  app->add_option("CKPT", flags->checkpoint, "Checkpoint folder, or 'pocket'")->required();
  app->add_option("--data", flags->data, "Data set (JSON lines)");
  app->add_option("--out", flags->out, "Statistics folder to make; must not exist");
  app->add_option("--rows", flags->rows, "Use at most so many rows, spread over the set; 0 = all")
      ->check(CLI::NonNegativeNumber);
  app->add_option("--engram", flags->engram, "Another folder that holds the Engram shards");
  app->add_option("--numerics", flags->numerics, "full or kvq")->check(CLI::IsMember({"full", "kvq"}));
  app->add_option("--expert-top-p", flags->top_p, "Also count reads as served: experts that reach this part of the weights")
      ->check(CLI::Range(1e-9, 1.0));
  app->add_option("--min-experts", flags->min_experts, "Least experts per token as served")->check(CLI::Range(1, 1024));
  app->add_option("--draft-stride", flags->draft_stride, "One draft call per so many positions")
      ->check(CLI::PositiveNumber);
  app->add_flag("--strict", flags->strict, "Exit code 1 when an expert has too few tokens");
  app->add_option("--min-tokens", flags->min_tokens, "What --strict asks of every expert; 0: as many as w1 has inputs")
      ->check(CLI::NonNegativeNumber);
  app->add_option("--memory-limit", flags->memory_limit_gib, "GiB that the run may take; default: 80 % of what is available")
      ->check(CLI::Range(1e-3, 1e6));
  app->add_flag("--dry-run", flags->dry_run, "Say what it would take, and what streaming a set of --tokens takes");
  app->add_option("--tokens", flags->tokens, "Sizes of sets for --dry-run; default 853106, 1406759")
      ->delimiter(',')
      ->check(CLI::PositiveNumber);
  app->add_option("--export-layer", flags->export_layer, "Write this layer's inputs and Hessians to --out-x, for checks by others")
      ->check(CLI::NonNegativeNumber);
  app->add_option("--out-x", flags->export_file, "File for --export-layer");
  app->add_option("--routing-exponent", flags->routing_exponent, "p of the exported Hessians: a routed token weighs g^p")
      ->check(CLI::Range(0.0, 4.0));
}

}  // namespace espalier::app
