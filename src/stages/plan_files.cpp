#include "stages/plan_files.h"

#include "base/file.h"
#include "base/hash.h"
#include "stages/plan/relinearise.h"
#include "stages/plan/report.h"
#include "stages/provenance.h"

namespace espalier {
namespace {

constexpr uint64_t kMaxText = uint64_t{256} << 20;

Status same(const std::string& what, const std::string& expected, const std::string& found) {
  if (expected.empty() || expected == found) return ok_status();
  return failed_precondition("plan: " + what + ": the sensitivity table was measured with " + expected + ", found " +
                             found + "; use the files that belong together");
}

std::string quoted(const std::filesystem::path& path) {
  return "'" + path.string() + "'";
}

Status relinearise_tables(const PlanPaths& paths, LoadedTables& out) {
  if (paths.around.empty() != paths.present.empty()) {
    return invalid_argument("expected a table measured around a plan and that plan together, found only one of them");
  }
  if (paths.around.empty()) return ok_status();
  PlanInputs& t = out.tables;
  ASSIGN_OR_RETURN(const std::string around_text, read_text_file(paths.around, kMaxText));
  ASSIGN_OR_RETURN(const Sensitivity around, parse_sensitivity(around_text, quoted(paths.around), t.config));
  ASSIGN_OR_RETURN(const std::string plan_text, read_text_file(paths.present, kMaxText));
  ASSIGN_OR_RETURN(const PackPlan plan, parse_pack_plan(plan_text, quoted(paths.present), t.config));
  ASSIGN_OR_RETURN(t.table, relinearise(t, around, plan, sha256_hex(plan_text)));
  out.hashes["around_sha256"] = sha256_hex(around_text);
  out.hashes["present_plan_sha256"] = sha256_hex(plan_text);
  return ok_status();
}

}  // namespace

Result<LoadedTables> load_plan_tables(const PlanPaths& paths) {
  LoadedTables out;
  PlanInputs& t = out.tables;
  ASSIGN_OR_RETURN(t.config, load_config(paths.checkpoint.string()));
  ASSIGN_OR_RETURN(const std::string text, read_text_file(paths.sensitivity, kMaxText));
  ASSIGN_OR_RETURN(t.table, parse_sensitivity(text, quoted(paths.sensitivity), t.config));
  ASSIGN_OR_RETURN(t.routing, read_routing_statistics(paths.stats / kRoutingFile, t.config));
  ASSIGN_OR_RETURN(const std::string identity, model_identity(paths.checkpoint));
  RETURN_IF_ERROR(same("checkpoint", t.table.model_identity, identity));
  RETURN_IF_ERROR(same(kRoutingFile, t.table.routing_sha256, t.routing.sha256));
  out.hashes = {
      {"sensitivity_sha256", sha256_hex(text)}, {"routing_sha256", t.routing.sha256}, {"model_identity", identity}};
  if (!paths.law_only && (!t.table.errors_sha256.empty() || std::filesystem::exists(paths.stats / kErrorsFile))) {
    ASSIGN_OR_RETURN(t.errors, read_matrix_errors(paths.stats / kErrorsFile, t.config));
    RETURN_IF_ERROR(same(kErrorsFile, t.table.errors_sha256, t.errors->sha256));
    out.hashes["errors_sha256"] = t.errors->sha256;
  }
  if (!t.table.blocks_sha256.empty()) {
    std::filesystem::path path = paths.sensitivity;
    path.replace_extension(".blocks.safetensors");
    ASSIGN_OR_RETURN(out.blocks, read_block_slopes(path, t.config));
    RETURN_IF_ERROR(same(path.filename().string(), t.table.blocks_sha256, out.blocks->sha256));
  }
  if (const auto it = t.routing.metadata.find("calibration_sha256"); it != t.routing.metadata.end())
    out.hashes.insert(*it);
  RETURN_IF_ERROR(relinearise_tables(paths, out));
  return out;
}

Status write_plan_report(const std::filesystem::path& path, const PlanInputs& tables, const PlanRequest& request,
                         const PlanOutcome& outcome) {
  std::vector<double> budgets;
  for (int k = -6; k <= 6; ++k) budgets.push_back(request.bpw + 0.1 * k);
  ASSIGN_OR_RETURN(const std::vector<BudgetPoint> curve, budget_curve(tables, request, budgets));
  const auto uniform = outcome.rules.find(PlanRule::kUniform);
  const double uniform_kl =
      uniform == outcome.rules.end() ? outcome.figures.predicted_kl : uniform->second.predicted_kl;
  const int n_layers = tables.config.n_layers;
  const BudgetPoint chosen{request.bpw, outcome.figures.predicted_kl, uniform_kl};
  const std::string page = plan_report_html(tables, request, outcome, curve, chosen);
  if (path.extension() == ".html") return write_text_file(path, page);
  ASSIGN_OR_RETURN(AtomicDirectory dir, AtomicDirectory::create(path));
  for (const auto& [name, text] :
       {std::pair{"report.txt", plan_report_text(tables, request, outcome)},
        std::pair{"experts.csv", plan_experts_csv(tables, request, outcome)},
        std::pair{"widths_by_layer.svg", widths_by_layer_svg(outcome.plan, n_layers)},
        std::pair{"widths.svg", widths_svg(outcome.plan, n_layers)},
        std::pair{"budget.svg", budget_curve_svg(curve, chosen)}, std::pair{"report.html", page}}) {
    if (Status status = write_text_file(dir.partial_path() / name, text); !status.ok()) {
      dir.discard();
      return status;
    }
  }
  return dir.commit();
}

}  // namespace espalier
