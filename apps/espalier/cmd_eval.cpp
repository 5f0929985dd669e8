// espalier eval kl | ppl: quality over a panel, per domain, with a sidecar of per-position values.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <filesystem>

#include "apps/espalier/command.h"
#include "base/file.h"
#include "stages/eval/eval.h"
#include "stages/provenance.h"

namespace espalier::app {
namespace {

struct Flags {
  std::string reference, candidate, model, panel, out, engram;
  std::string numerics = "kvq";
  std::string products = "exact";
  int64_t chunk = 256;
  int64_t rows = 0;
};

Result<LoadedModel> load(const std::string& dir, const Flags& flags, CommandContext& context) {
  LoadOptions options;
  options.engram_dir = flags.engram;
  options.products = *products_from_name(flags.products);
  ASSIGN_OR_RETURN(const std::optional<int> device, choose_device(context.common, options.products));
  return LoadedModel::load(dir, options, device, context.pool);
}

Status write_results(const std::string& out, const EvalResult& result, const EvalProvenance& provenance) {
  ASSIGN_OR_RETURN(AtomicDirectory folder, AtomicDirectory::create(out));
  Status status = write_text_file(folder.partial_path() / "result.json", eval_record(result, provenance, 1) + "\n");
  if (status.ok()) status = write_text_file(folder.partial_path() / "report.txt", eval_report(result, provenance));
  if (status.ok()) status = write_sidecar(folder.partial_path() / "sidecar.safetensors", result.sidecar);
  if (status.ok()) status = folder.commit();
  if (!status.ok()) folder.discard();
  return status;
}

Result<int> run(const Flags& flags, bool pair, CommandContext& context) {
  ASSIGN_OR_RETURN(const std::string reference_dir, resolve_model(pair ? flags.reference : flags.model));
  std::string candidate_dir;
  if (pair) {
    ASSIGN_OR_RETURN(candidate_dir, resolve_model(flags.candidate));
  }
  std::error_code ec;
  if (!flags.out.empty() && std::filesystem::exists(flags.out, ec)) {
    return failed_precondition("output '" + flags.out + "' exists already; choose another name or remove it");
  }
  ASSIGN_OR_RETURN(Dataset panel, load_dataset(flags.panel));
  EvalProvenance provenance;
  provenance.tool = std::string("espalier ") + ESPALIER_VERSION;
  provenance.panel_rows = static_cast<int64_t>(panel.rows.size());
  provenance.panel_sha256 = panel.sha256;
  panel.rows = spread_rows(panel.rows, flags.rows);
  provenance.panel_content_sha256 = dataset_content_sha256(panel.rows);
  provenance.options.numerics = *numerics_from_name(flags.numerics);
  provenance.options.products = *products_from_name(flags.products);
  provenance.options.chunk = flags.chunk;

  ASSIGN_OR_RETURN(const LoadedModel reference, load(reference_dir, flags, context));
  ASSIGN_OR_RETURN(provenance.reference_id, model_identity(reference_dir));
  const auto start = std::chrono::steady_clock::now();
  Result<EvalResult> outcome = internal_error("not run");
  if (pair) {
    LoadedModel candidate = reference;  // one folder on both sides: its weights are loaded once, run twice
    if (!std::filesystem::equivalent(reference_dir, candidate_dir, ec)) {
      ASSIGN_OR_RETURN(candidate, load(candidate_dir, flags, context));
    }
    ASSIGN_OR_RETURN(provenance.candidate_id, model_identity(candidate_dir));
    outcome = evaluate_kl(reference, candidate, panel, provenance.options, context.progress, context.pool);
  } else {
    outcome = evaluate_ppl(reference, panel, provenance.options, context.progress, context.pool);
  }
  if (!outcome.ok()) return std::move(outcome).error();
  EvalResult& result = *outcome;
  provenance.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!flags.out.empty()) {
    describe_sidecar(provenance, &result.sidecar);
    RETURN_IF_ERROR(write_results(flags.out, result, provenance));
  }
  if (context.common.json)
    print_json(eval_record(result, provenance));
  else
    std::fputs(eval_report(result, provenance).c_str(), stdout);
  return 0;
}

void add_shared(CLI::App* app, Flags* flags) {
  app->add_option("--panel", flags->panel, "Panel (JSON lines)")->required();
  app->add_option("--out", flags->out, "Folder to make: result.json, report.txt and sidecar.safetensors");
  app->add_option("--numerics", flags->numerics, "full, kvq or vendor")
      ->check(CLI::IsMember({"full", "kvq", "vendor"}));
  app->add_option("--products", flags->products, "Products with EXL3 mul1 weights: exact, or in integers (faster, rounded): int8, int8r")
      ->capture_default_str()
      ->check(CLI::IsMember({"exact", "int8", "int8r"}));
  app->add_option("--chunk", flags->chunk, "Positions per forward call")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
  app->add_option("--rows", flags->rows, "Use at most so many rows, spread over the panel; 0 = all")
      ->check(CLI::NonNegativeNumber);
  app->add_option("--engram", flags->engram, "Another folder that holds the Engram shards");
}

}  // namespace

void add_eval(CommandTable& table) {
  CLI::App* group = table.add_group("eval", "Measures quality over a panel");
  const auto kl_flags = std::make_shared<Flags>();
  CLI::App* kl = table.add_to(group, "kl", "KL divergence, top-1 agreement and perplexity of two models",
                              [kl_flags](CommandContext& context) { return run(*kl_flags, true, context); });
  table.runs_on_gpu(kl);
  kl->add_option("--reference", kl_flags->reference, "Native model folder, or 'pocket'")->required();
  kl->add_option("--candidate", kl_flags->candidate, "Quantized model folder")->required();
  add_shared(kl, kl_flags.get());
  const auto ppl_flags = std::make_shared<Flags>();
  CLI::App* ppl = table.add_to(group, "ppl", "Perplexity of one model",
                               [ppl_flags](CommandContext& context) { return run(*ppl_flags, false, context); });
  table.runs_on_gpu(ppl);
  ppl->add_option("model", ppl_flags->model, "Model folder, or 'pocket'")->required();
  add_shared(ppl, ppl_flags.get());
}

}  // namespace espalier::app
