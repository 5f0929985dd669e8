// espalier sensitivity: what it costs, in KL, to replace a layer's experts by a pack's, or to add noise like a pack's errors.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "apps/espalier/command.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/log.h"
#include "format/json.h"
#include "stages/provenance.h"
#include "stages/swap_sensitivity.h"

namespace espalier::app {
namespace {

namespace fs = std::filesystem;

struct Flags {
  std::string checkpoint, data, stats, out, stats_out, engram, plan;
  std::string noise = "shaped";
  int draws = 2;
  std::string method = "swap", per = "layer", numerics = "kvq";
  std::vector<std::string> packs;
  int64_t rows = 0;
  int resamples = 200;
  double memory_gib = 4;
};

Result<WeightLoader> open_model(const std::string& dir, const std::string& engram) {
  LoadOptions load;
  load.engram_dir = engram;
  return WeightLoader::open(dir, load);
}

void print_text(const Sensitivity& table, const std::string& out) {
  std::printf("%s: KL per unit of relative squared error of a layer's routed output\n%-6s", out.c_str(), "layer");
  for (const SensitivityDomain& d : table.domains) std::printf(" %18s", d.name.c_str());
  std::printf("\n");
  for (size_t l = 0; l < table.layers.size(); ++l) {
    std::printf("%-6zu", l);
    for (size_t d = 0; d < table.domains.size(); ++d) {
      std::printf(" %9.4f +- %5.4f", table.layers[l].slope[d], table.layers[l].slope_se[d]);
    }
    std::printf("\n");
  }
  std::printf("%-6s", "adds");
  for (const SensitivityDomain& d : table.domains) std::printf(" %18.4f", d.additivity);
  std::printf("   all layers at once over the sum of single ones\n%-6s", "floor");
  for (const SensitivityDomain& d : table.domains) std::printf(" %18.3g", d.floor);
  std::printf("   nats that no width changes\n");
}

Status check_flags(const Flags& flags) {
  const bool takes_two = flags.method == "swap" && flags.plan.empty();
  if (flags.packs.size() > (takes_two ? 2 : 1)) {
    return invalid_argument(std::string("--swap-pack: expected ") + (takes_two ? "one or two packs" : "one pack with --method noise or --plan") +
                            ", found " + std::to_string(flags.packs.size()));
  }
  if (flags.method == "noise" && (!flags.plan.empty() || flags.per == "expert")) {
    return invalid_argument("--method noise measures layers around the native model: leave out --plan and --per expert");
  }
  if (!flags.plan.empty() && flags.per == "expert") return invalid_argument("--plan measures layers: leave out --per expert");
  return ok_status();
}

// The plan's sha256. Refuses a pack that does not have the plan's widths.
Result<std::string> check_plan(const std::string& path, const WeightLoader& pack) {
  const Config& config = pack.config();
  ASSIGN_OR_RETURN(const std::string text, read_text_file(path, uint64_t{256} << 20));
  ASSIGN_OR_RETURN(const PackPlan plan, parse_pack_plan(text, "'" + path + "'", config));
  ASSIGN_OR_RETURN(const std::vector<ExpertWidths> found, expert_widths(pack));
  for (size_t i = 0; i < found.size(); ++i) {
    const auto n = static_cast<size_t>(config.n_experts);
    const auto layer = plan.experts.find(static_cast<int>(i / n));
    if (layer != plan.experts.end()) {
      const ExpertWidths& w = layer->second[i % n];
      if (w.w1 == found[i].w1 && w.w2 == found[i].w2 && w.w3 == found[i].w3) continue;
    }
    return failed_precondition("'" + pack.dir() + "': layer " + std::to_string(i / n) + " expert " + std::to_string(i % n) +
                               " has not the widths of '" + path + "'; give the pack that was made from this plan");
  }
  return sha256_hex(text);
}

Result<int> run(const Flags& flags, CommandContext& context) {
  RETURN_IF_ERROR(check_flags(flags));
  ASSIGN_OR_RETURN(const std::string checkpoint, resolve_model(flags.checkpoint));
  ASSIGN_OR_RETURN(Dataset data, load_dataset(flags.data));
  ASSIGN_OR_RETURN(const WeightLoader native, open_model(checkpoint, flags.engram));
  const Config& config = native.config();
  RETURN_IF_ERROR(check_dataset_fits(data, config.vocab, config.max_positions, fs::path(flags.data).filename().string()));
  data.rows = spread_rows(data.rows, flags.rows);
  ASSIGN_OR_RETURN(const RoutingStatistics routing, read_routing_statistics(fs::path(flags.stats) / kRoutingFile, config));
  std::optional<MatrixErrors> errors;
  if (fs::exists(fs::path(flags.stats) / kErrorsFile)) {
    ASSIGN_OR_RETURN(errors, read_matrix_errors(fs::path(flags.stats) / kErrorsFile, config));
  }
  SwapSensitivityOptions options;
  std::vector<WeightLoader> packs;
  for (const std::string& dir : flags.packs) {
    ASSIGN_OR_RETURN(WeightLoader pack, open_model(dir, flags.engram));
    packs.push_back(std::move(pack));
    ASSIGN_OR_RETURN(const std::string identity, model_identity(dir));
    options.packs.push_back(fs::path(dir).filename().string() + " " + identity.substr(0, 12));
  }
  std::vector<const WeightLoader*> views;
  for (const WeightLoader& pack : packs) views.push_back(&pack);
  options.by_expert = flags.per == "expert";
  if (options.by_expert && flags.stats_out.empty()) {
    return invalid_argument("--per expert: expected --stats-out FOLDER for the shares that it measures, found none");
  }
  std::string plan_sha256;
  if (!flags.plan.empty()) {
    options.method = SensitivityMethod::kAround;
    ASSIGN_OR_RETURN(plan_sha256, check_plan(flags.plan, packs.front()));
  }
  if (flags.method == "noise") options.method = SensitivityMethod::kNoise;
  options.noise = flags.noise == "white" ? NoiseShape::kWhite : NoiseShape::kShaped;
  options.draws = flags.draws;
  options.resamples = flags.resamples;
  options.seed = context.common.seed;
  options.sweep.numerics = *numerics_from_name(flags.numerics);
  options.sweep.memory_bytes = static_cast<uint64_t>(flags.memory_gib * (1ull << 30));
  ASSIGN_OR_RETURN(SwapSensitivity made, swap_sensitivity(native, views, routing, errors, data, options, context.progress, context.pool));

  Sensitivity& table = made.table;
  for (const SensitivityDomain& d : table.domains) {
    if (d.blocks == 1) log(LogLevel::kWarning, "domain '" + d.name + "' has one row, so its slopes' errors are not known (written as 0); give it more rows");
  }
  ASSIGN_OR_RETURN(table.model_identity, model_identity(checkpoint));
  table.inputs["data_content_sha256"] = data.content_sha256;
  table.inputs["numerics"] = flags.numerics;
  if (table.base) table.base->plan_sha256 = plan_sha256;
  table.routing_sha256 = routing.sha256;
  if (errors) table.errors_sha256 = errors->sha256;
  if (options.by_expert) {
    fs::create_directories(flags.stats_out);
    made.routing.metadata["shares"] = "measured by exchanging single experts";
    made.routing.metadata["routing_sha256"] = routing.sha256;
    const fs::path path = fs::path(flags.stats_out) / kRoutingFile;
    RETURN_IF_ERROR(write_routing_statistics(path, made.routing, config));
    ASSIGN_OR_RETURN(table.routing_sha256, sha256_file_hex(path));
    if (errors) RETURN_IF_ERROR(write_matrix_errors(fs::path(flags.stats_out) / kErrorsFile, *errors, config));
    if (errors) {
      ASSIGN_OR_RETURN(table.errors_sha256, sha256_file_hex(fs::path(flags.stats_out) / kErrorsFile));
    }
  }
  const fs::path blocks = fs::path(flags.out).replace_extension("blocks.safetensors");
  RETURN_IF_ERROR(write_block_slopes(blocks, made.blocks, config));
  ASSIGN_OR_RETURN(table.blocks_sha256, sha256_file_hex(blocks));
  const std::string text = sensitivity_json(table, config);
  RETURN_IF_ERROR(write_text_file(flags.out, text));
  if (context.common.json) print_json(text);
  else print_text(table, flags.out);
  return 0;
}

}  // namespace

void add_sensitivity(CommandTable& table) {
  const auto flags = std::make_shared<Flags>();
  CLI::App* app = table.add("sensitivity", "Measures what replacing a layer's experts by a pack's costs, for plan",
                            [flags](CommandContext& context) { return run(*flags, context); });
  app->add_option("checkpoint", flags->checkpoint, "Folder of the official checkpoint, or 'pocket'")->required();
  app->add_option("--data", flags->data, "Sensitivity set (JSON lines), not the panel that plans are judged by")->required();
  app->add_option("--stats", flags->stats, "Statistics folder: routing.safetensors, and errors.safetensors of a width library")->required();
  app->add_option("--method", flags->method, "swap: experts of a layer replaced by a pack's; noise: noise made from the pack's errors added to them")
      ->check(CLI::IsMember({"swap", "noise"}));
  app->add_option("--plan", flags->plan, "The swap pack's plan: measure around it, all layers exchanged and one restored, for plan --around");
  app->add_option("--noise", flags->noise, "shaped: the encoder's errors with random signs; white: as strong, without their shape")
      ->check(CLI::IsMember({"shaped", "white"}));
  app->add_option("--draws", flags->draws, "Pairs of opposite draws of the noise")->check(CLI::Range(1, 64));
  app->add_option("--swap-pack", flags->packs, "Pack of this checkpoint; give a second one of other widths to tell the part that no width changes")->required();
  app->add_option("--per", flags->per, "layer, or expert: every expert alone too, which measures shares (small models)")
      ->check(CLI::IsMember({"layer", "expert"}));
  app->add_option("--stats-out", flags->stats_out, "Folder for the statistics with measured shares (--per expert)");
  app->add_option("--out", flags->out, "Table to write; slopes of single rows go to OUT.blocks.safetensors")->required();
  app->add_option("--rows", flags->rows, "Use at most so many rows, spread over the set; 0 = all")->check(CLI::NonNegativeNumber);
  app->add_option("--numerics", flags->numerics, "Numerics of the forward passes")->check(CLI::IsMember({"full", "kvq"}));
  app->add_option("--resamples", flags->resamples, "Resamples of rows for the errors of the slopes")->check(CLI::Range(2, 100000));
  app->add_option("--memory-gib", flags->memory_gib, "Memory for rows in flight; decides how many are taken at once")->check(CLI::Range(0.01, 4096.0));
  app->add_option("--engram", flags->engram, "Another folder that holds the Engram shards");
}

}  // namespace espalier::app
