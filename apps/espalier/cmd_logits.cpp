// espalier logits: logits of every position of some token lists, for comparison with other implementations.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "apps/espalier/command.h"
#include "base/simd_tier.h"
#include "format/json.h"
#include "format/safetensors.h"
#include "model/loaded_model.h"

namespace espalier::app {
namespace {

struct LogitsOptions {
  std::string model, tokens, out, engram;
  std::string numerics = "full";
  std::string products = "exact";
  std::string simd;
  int64_t chunk = 0;
  int64_t decode_from = -1;
};

Result<std::vector<std::vector<int32_t>>> read_prompts(const std::string& path) {
  ASSIGN_OR_RETURN(const Json json, read_json_file(path));
  const std::string shape = path + ": expected an array of arrays of token ids, found ";
  if (!json.is_array() || json.empty())
    return data_loss(shape + (json.is_array() ? "an empty array" : "something else"));
  std::vector<std::vector<int32_t>> prompts;
  for (const Json& item : json) {
    const std::string which = "prompt " + std::to_string(prompts.size());
    if (!item.is_array()) return data_loss(shape + which + " that is not an array");
    if (item.empty()) return invalid_argument(path + ": " + which + ": expected at least one id, found none");
    std::vector<int32_t> ids;
    for (const Json& id : item) {
      if (!id.is_number_integer() || id < 0 || id > INT32_MAX) {
        return data_loss(path + ": " + which + ": expected a token id, found " + dump_json(id).substr(0, 60));
      }
      ids.push_back(id.get<int32_t>());
    }
    prompts.push_back(std::move(ids));
  }
  return prompts;
}

// Logits [n, vocab] of one prompt: prefill in chunks, then one position at a time from `decode_from`.
Result<Tensor> prompt_logits(const LoadedModel& model, const std::vector<int32_t>& ids, const LogitsOptions& o,
                             Numerics numerics, CommandContext& context) {
  const int64_t n = static_cast<int64_t>(ids.size());
  const int64_t vocab = model.config().vocab;
  if (n > model.config().max_positions) {
    return resource_exhausted("expected at most " + std::to_string(model.config().max_positions) +
                              " tokens (max_position_embeddings), found " + std::to_string(n) + "; shorten the prompt");
  }
  ASSIGN_OR_RETURN(const LoadedModel::Feed feed, model.open(numerics, context.pool));
  const int64_t chunk = o.chunk > 0 ? o.chunk : ForwardOptions().chunk;
  Tensor logits(DType::kF32, {n, vocab});
  const int64_t prefill = o.decode_from < 0 ? n : std::min(o.decode_from, n);
  for (int64_t done = 0; done < n;) {
    if (context.progress.is_cancelled()) return cancelled("logits: stopped");
    const int64_t rows = done < prefill ? std::min(chunk, prefill - done) : 1;
    const std::span<const int32_t> part(ids.data() + done, static_cast<size_t>(rows));
    ASSIGN_OR_RETURN(const Tensor part_logits, feed(part));
    std::copy_n(part_logits.f32(), rows * vocab, logits.f32() + done * vocab);
    done += rows;
    context.progress.advance(rows);
  }
  return logits;
}

Result<int> run(const LogitsOptions& o, CommandContext& context) {
  const auto numerics = numerics_from_name(o.numerics);
  if (!numerics) return invalid_argument("--numerics: expected full, kvq or vendor, found '" + o.numerics + "'");
  if (!o.simd.empty()) {
    const auto tier = simd_tier_from_name(o.simd);
    if (!tier || !set_simd_tier(*tier)) {
      return invalid_argument(
          "--simd: expected reference, baseline, avx2 or avx512 as far as this machine has it, found '" + o.simd + "'");
    }
  }
  RETURN_IF_ERROR(check_output(o.out, {o.tokens}));
  ASSIGN_OR_RETURN(const auto prompts, read_prompts(o.tokens));
  ASSIGN_OR_RETURN(const std::string dir, resolve_model(o.model));
  LoadOptions load;
  load.engram_dir = o.engram;
  load.products = *products_from_name(o.products);
  ASSIGN_OR_RETURN(const std::optional<int> device, choose_device(context.common, load.products));
  ASSIGN_OR_RETURN(const LoadedModel model, LoadedModel::load(dir, load, device, context.pool));
  int64_t total = 0;
  for (const auto& ids : prompts) total += static_cast<int64_t>(ids.size());
  context.progress.begin("logits", total);
  std::vector<Tensor> logits;
  for (size_t i = 0; i < prompts.size(); ++i) {
    auto result = prompt_logits(model, prompts[i], o, *numerics, context);
    if (!result.ok()) return std::move(result).error().with_context("prompt " + std::to_string(i));
    logits.push_back(std::move(*result));
  }
  std::vector<NamedView> views;
  for (size_t i = 0; i < logits.size(); ++i) views.push_back({"logits." + std::to_string(i), logits[i].view()});
  RETURN_IF_ERROR(write_safetensors(o.out, views));
  if (context.common.json) {
    print_json(
        dump_json(Json{{"out", o.out}, {"prompts", prompts.size()}, {"positions", total}, {"numerics", o.numerics}}));
  }
  return 0;
}

}  // namespace

void add_logits(CommandTable& table) {
  auto o = std::make_shared<LogitsOptions>();
  CLI::App* app =
      table.add("logits", "Logits of every position of token lists", [o](CommandContext& c) { return run(*o, c); });
  table.runs_on_gpu(app);
  app->add_option("model", o->model, "Model folder, or 'pocket'")->required();
  app->add_option("--tokens", o->tokens, "JSON file: an array of arrays of token ids")->required();
  app->add_option("--out", o->out, "Safetensors file to write: logits.0, logits.1, … f32 [n, vocab]")->required();
  app->add_option("--chunk", o->chunk, "Prefill in calls of this many tokens")->check(CLI::Range(1, 1 << 20));
  app->add_option("--decode-from", o->decode_from, "Feed positions from here on one at a time")
      ->check(CLI::Range(0, 1 << 24));
  app->add_option("--numerics", o->numerics, "full, kvq or vendor")->capture_default_str();
  app->add_option("--products", o->products, "Products with EXL3 mul1 weights: exact, or in integers (faster, rounded): int8, int8r")
      ->capture_default_str()
      ->check(CLI::IsMember({"exact", "int8", "int8r"}));
  app->add_option("--engram", o->engram, "Another folder that holds the Engram shards");
  app->add_option("--simd", o->simd, "Pin the operations to one implementation")->group("");
}

}  // namespace espalier::app
