// `espalier plan CKPT`: widths per expert from measured tables under limits.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "apps/espalier/command.h"
#include "base/file.h"
#include "format/json.h"
#include "stages/plan/confidence.h"
#include "stages/plan/plan.h"
#include "stages/plan/plan_file.h"
#include "stages/plan/relinearise.h"
#include "stages/plan/report.h"
#include "stages/plan_files.h"

namespace espalier::app {
namespace {

struct Flags {
  std::string checkpoint, stats, sensitivity, out, report;
  std::string around, present;
  double bpw = 0;
  std::optional<double> read_cap;
  std::string bpw_of = "routed", granularity = "expert", reads = "routed", rule = "measured";
  std::vector<std::string> guards, weights, widths = {"2", "3", "4", "5"}, min, max, pin;
  bool free_gate_up = false, law_only = false;
  double super_share = 0.2, super_width = 5;
  int64_t rows = 1, resamples = 0;
  std::optional<double> dense_bits, head_bits, drafter_bits;
};

Result<std::map<std::string, double>> numbers_of(const std::vector<std::string>& given, const char* flag) {
  std::map<std::string, double> out;
  for (const std::string& text : given) {
    const size_t equals = text.rfind('=');
    double value = 0;
    const char* end = text.data() + text.size();
    bool is_number = equals != std::string::npos && equals > 0;
    if (is_number) {
      const auto [stop, code] = std::from_chars(text.data() + equals + 1, end, value);
      is_number = stop == end && code == std::errc() && std::isfinite(value);
    }
    if (!is_number || !out.emplace(text.substr(0, equals), value).second) {
      return invalid_argument(std::string(flag) + ": expected DOMAIN=NUMBER, each domain once, found '" + text + "'");
    }
  }
  return out;
}

Result<int> width_of(const std::string& text, bool allows_native, const char* flag) {
  if (allows_native && text == "native") return kNativeWidth;
  for (int k2 = 2; k2 <= 16; ++k2) {
    if (width_char(k2) != '?' && width_text_of(k2) == text) return k2;
  }
  return invalid_argument(std::string(flag) + ": expected 1 to 8, 1.5, 2.5, 3.5" + (allows_native ? " or native" : "") +
                          ", found '" + text + "'");
}

Result<std::optional<int>> width_of(const std::optional<double>& bits, const char* flag) {
  if (!bits) return std::optional<int>();
  const double k2 = 2 * *bits;
  if (k2 == std::floor(k2) && k2 >= 2 && k2 <= 16 && width_char(static_cast<int>(k2)) != '?')
    return std::optional<int>(static_cast<int>(k2));
  return invalid_argument(std::string(flag) + ": expected 1 to 8, 1.5, 2.5 or 3.5, found " + std::to_string(*bits));
}

Result<PlanRequest> request_of(const Flags& flags, const Config& config, uint64_t seed) {
  PlanRequest r;
  r.bpw = flags.bpw;
  r.budget_of = flags.bpw_of == "card" ? BudgetOf::kCard : BudgetOf::kRouted;
  r.read_cap = flags.read_cap;
  ASSIGN_OR_RETURN(r.guards, numbers_of(flags.guards, "--guard"));
  ASSIGN_OR_RETURN(r.weights, numbers_of(flags.weights, "--weight"));
  r.widths.clear();
  for (const std::string& text : flags.widths) {
    ASSIGN_OR_RETURN(const int k2, width_of(text, true, "--widths"));
    if (std::find(r.widths.begin(), r.widths.end(), k2) == r.widths.end()) r.widths.push_back(k2);
  }
  r.per_matrix = flags.granularity == "matrix";
  r.ties_gate_up = !flags.free_gate_up;
  for (const auto& [texts, bound] :
       {std::pair{&flags.min, "min"}, std::pair{&flags.max, "max"}, std::pair{&flags.pin, "pin"}}) {
    for (const std::string& text : *texts) {
      ASSIGN_OR_RETURN(WidthPin pin, parse_pin(text, bound, config));
      r.pins.push_back(std::move(pin));
    }
  }
  r.super_share = flags.super_share;
  ASSIGN_OR_RETURN(const std::optional<int> super_k2,
                   width_of(std::optional<double>(flags.super_width), "--super-width"));
  r.super_k2 = *super_k2;
  r.as_served = flags.reads == "served";
  r.rows = flags.rows;
  ASSIGN_OR_RETURN(r.dense_k2, width_of(flags.dense_bits, "--dense-bits"));
  ASSIGN_OR_RETURN(r.head_k2, width_of(flags.head_bits, "--head-bits"));
  ASSIGN_OR_RETURN(r.drafter_k2, width_of(flags.drafter_bits, "--drafter-bits"));
  r.rule = *plan_rule_from_name(flags.rule);
  r.seed = seed;
  return r;
}

Json to_json(const PlanInputs& tables, const PlanRequest& request, const PlanOutcome& outcome) {
  const PlanFigures& f = outcome.figures;
  Json domains = Json::object(), widths = Json::object(), ranks = Json::object(), rules = Json::object(),
       limits = Json::object();
  for (size_t d = 0; d < f.kl.size(); ++d) domains[tables.table.domains[d].name] = f.kl[d];
  std::map<int, int64_t> counts;
  for (int layer = 0; layer < tables.config.n_layers; ++layer) {
    for (const ExpertWidths& w : outcome.plan.experts.at(layer)) {
      for (const int k2 : {w.w1, w.w3, w.w2}) ++counts[k2];
    }
  }
  for (const auto& [k2, n] : counts) widths[width_text_of(k2)] = n;
  for (const auto& [n, bytes] : f.rank_bytes) ranks[std::to_string(n)] = bytes;
  for (const auto& [rule, g] : outcome.rules) {
    rules[std::string(plan_rule_name(rule))] = {
        {"predicted_kl", g.predicted_kl}, {"bpw", g.bpw_routed}, {"read_bpw", g.bpw_read}};
  }
  limits["storage"] = 2 * outcome.allocation.prices.storage;
  if (request.read_cap) limits["read"] = 2 * kReadUnits * outcome.allocation.prices.reads;
  for (size_t d = 0; d < f.kl.size(); ++d) {
    if (outcome.problem.allocation.domains[d].limit)
      limits["guards"][tables.table.domains[d].name] = outcome.allocation.prices.guards[d];
  }
  Json ceilings = Json::array();
  for (const SpeedCeiling& c : f.ceilings) {
    ceilings.push_back({{"machine", c.machine},
                        {"ranks", c.ranks},
                        {"bytes_per_token", c.bytes_per_token},
                        {"tokens_per_second", c.tokens_per_second}});
  }
  return {{"predicted_kl", f.predicted_kl},
          {"bound", f.bound},
          {"bpw", f.bpw_routed},
          {"read_bpw", f.bpw_read},
          {"gap", f.gap},
          {"card_bpw", f.bpw_card ? Json(*f.bpw_card) : Json(nullptr)},
          {"rule", plan_rule_name(request.rule)},
          {"proved_optimal", outcome.allocation.is_proved_optimal && request.rule == PlanRule::kMeasured},
          {"domains", domains},
          {"widths", widths},
          {"multipliers", limits},
          {"pins", outcome.problem.pins.size()},
          {"rules", rules},
          {"routed_bytes", f.routed_bytes},
          {"dense_bytes", f.dense_bytes ? Json(*f.dense_bytes) : Json(nullptr)},
          {"rank_bytes", ranks},
          {"ceilings", ceilings},
          {"notes", additivity_notes(tables.table)}};
}

Json confidence_json(const PlanConfidence& c) {
  return {{"resamples", c.resamples},         {"from", c.has_blocks ? "blocks" : "standard errors"},
          {"infeasible", c.infeasible},       {"stable_share", c.stable_share},
          {"kl_ci95", {c.kl_low, c.kl_high}}, {"layer_stable_share", c.layer_stable},
          {"slope_low", c.slope_low},         {"slope_high", c.slope_high}};
}

void print_confidence(const PlanConfidence& c) {
  std::printf(
      "confidence from %lld resamples of %s: predicted KL %.6g to %.6g (95 %%); %.1f %% of the experts keep their "
      "widths in 90 %% of them\n",
      static_cast<long long>(c.resamples), c.has_blocks ? "blocks" : "standard errors", c.kl_low, c.kl_high,
      100 * c.stable_share);
  if (c.infeasible > 0)
    std::printf("  in %lld of them the limits could not be met\n", static_cast<long long>(c.infeasible));
  if (c.stable_share < 0.8)
    std::printf("  below 80 %%: measure on more tokens before trusting single experts' widths\n");
}

Result<int> run(const Flags& flags, CommandContext& context) {
  std::vector<std::string> read = {flags.sensitivity, flags.stats + "/" + kRoutingFile,
                                   flags.stats + "/" + kErrorsFile};
  for (const std::string& path : {flags.around, flags.present}) {
    if (!path.empty()) read.push_back(path);
  }
  RETURN_IF_ERROR(check_output(flags.out, read));
  if (flags.report.ends_with(".html")) {
    read.push_back(flags.out);
    RETURN_IF_ERROR(check_output(flags.report, read));
  }
  ASSIGN_OR_RETURN(const std::string dir, resolve_model(flags.checkpoint));
  ASSIGN_OR_RETURN(LoadedTables loaded, load_plan_tables({dir, flags.stats, flags.sensitivity, flags.around,
                                                          flags.present, flags.law_only}));
  loaded.hashes["solver"] = std::string("espalier ") + ESPALIER_VERSION;
  ASSIGN_OR_RETURN(const PlanRequest request, request_of(flags, loaded.tables.config, context.common.seed));
  ASSIGN_OR_RETURN(const PlanOutcome outcome, make_plan(loaded.tables, request));
  std::optional<PlanConfidence> confidence;
  if (flags.resamples > 0) {
    // Blocks belong to the table as measured, not to one that was averaged with another.
    const BlockSlopes* blocks = loaded.blocks && flags.around.empty() ? &*loaded.blocks : nullptr;
    ASSIGN_OR_RETURN(confidence, plan_confidence(loaded.tables, request, outcome, blocks, flags.resamples, context.pool,
                                                 context.progress));
  }
  if (!flags.report.empty()) RETURN_IF_ERROR(write_plan_report(flags.report, loaded.tables, request, outcome));
  RETURN_IF_ERROR(write_text_file(flags.out, plan_file_json(loaded.tables, request, outcome, loaded.hashes)));
  if (context.common.json) {
    Json doc = to_json(loaded.tables, request, outcome);
    doc["confidence"] = confidence ? confidence_json(*confidence) : Json(nullptr);
    doc["out"] = flags.out;
    print_json(dump_json(doc));
    return 0;
  }
  std::fputs(plan_report_text(loaded.tables, request, outcome).c_str(), stdout);
  if (confidence) print_confidence(*confidence);
  for (const std::string& note : additivity_notes(loaded.tables.table)) std::printf("note: %s\n", note.c_str());
  std::printf("%s\n", flags.out.c_str());
  return 0;
}

}  // namespace

void add_plan(CommandTable& table) {
  const auto flags = std::make_shared<Flags>();
  CLI::App* app = table.add("plan", "Widths per expert matrix from measured sensitivity, under limits",
                            [flags](CommandContext& context) { return run(*flags, context); });
  app->add_option("CKPT", flags->checkpoint, "Checkpoint folder, or 'pocket'")->required();
  app->add_option("--stats", flags->stats, "Statistics folder: routing.safetensors, errors.safetensors")->required();
  app->add_option("--sensitivity", flags->sensitivity, "Sensitivity table (docs/formats/sensitivity.md)")->required();
  app->add_option("--bpw", flags->bpw, "Budget in bits per weight")->required()->check(CLI::Range(0.0, 16.0));
  app->add_option("--bpw-of", flags->bpw_of,
                  "What the budget counts: routed experts, or the card's set at --dense-bits")
      ->check(CLI::IsMember({"routed", "card"}));
  app->add_option("--read-cap", flags->read_cap, "Bits per weight that a decoded token may read, over routed experts")
      ->check(CLI::Range(0.0, 16.0));
  const auto list = [&](const char* name, std::vector<std::string>* to, const char* help) {
    return app->add_option(name, *to, help)->allow_extra_args(false);
  };
  list("--guard", &flags->guards, "DOMAIN=x: predicted KL of a domain at most x nats; may be repeated");
  list("--weight", &flags->weights, "DOMAIN=w in place of the table's weight; may be repeated");
  list("--widths", &flags->widths, "Widths to choose from: 1 to 8, 1.5, 2.5, 3.5, native; default 2,3,4,5")
      ->delimiter(',');
  app->add_option("--granularity", flags->granularity, "One width per expert, or per matrix")
      ->check(CLI::IsMember({"expert", "matrix"}));
  app->add_flag("--free-gate-up", flags->free_gate_up, "With --granularity matrix: w1 and w3 may differ");
  list("--min", &flags->min, "LAYERS[:EXPERTS[:w1|w2|w3]]=WIDTH at least, such as 37-39=3; may be repeated");
  list("--max", &flags->max, "The same, at most");
  list("--pin", &flags->pin, "The same, exactly");
  app->add_option("--super-share", flags->super_share, "Share of its layer's output that makes a super expert; 0: none")
      ->check(CLI::Range(0.0, 1e6));
  app->add_option("--super-width", flags->super_width, "Least width of super experts (or native)");
  app->add_option("--reads", flags->reads, "Read frequencies as routed, or as served with pruned experts")
      ->check(CLI::IsMember({"routed", "served"}));
  app->add_option("--rows", flags->rows, "Tokens per step: distinct experts are read once")->check(CLI::Range(1, 4096));
  app->add_option("--dense-bits", flags->dense_bits,
                  "Width of attention, shared experts, compressor, indexer, Engram projection in the plan");
  app->add_option("--head-bits", flags->head_bits, "Width of the head in the plan");
  app->add_option("--drafter-bits", flags->drafter_bits, "Width of the drafter in the plan");
  app->add_option("--rule", flags->rule, "measured, or a simple rule to compare with")
      ->check(CLI::IsMember({"measured", "uniform", "ends-first", "frequency", "layer"}));
  app->add_option("--around", flags->around, "Second table, measured around --present: slopes are averaged");
  app->add_option("--present", flags->present, "The plan that --around was measured around");
  app->add_flag("--law-only", flags->law_only, "Amplitude law for every matrix, measured errors or not");
  app->add_option("--resamples", flags->resamples,
                  "Solve so many times under resampled slopes and say which widths are stable")
      ->check(CLI::Range(0, 100000));
  app->add_option("--out", flags->out, "Plan to write")->required();
  app->add_option("--report", flags->report, "Folder to make with report.html, report.txt, experts.csv and figures; X.html: the page alone");
}

}  // namespace espalier::app
