// espalier generate MODEL: one reply to a text, a chat or token ids.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "apps/espalier/command.h"
#include "base/file.h"
#include "format/json.h"
#include "model/numerics.h"
#include "runtime/network.h"
#include "text/chat.h"

namespace espalier::app {
namespace {

constexpr std::string_view kBos = "<｜begin▁of▁sentence｜>";

struct GenerateFlags {
  std::string model;
  std::string engram_dir;
  std::string prompt;
  std::string chat_file;
  std::string tokens_file;
  std::string numerics = "kvq";
  std::string products = "exact";
  std::string draft = "off";
  std::vector<std::string> stop;
  int64_t max_tokens = 0;
  int64_t context = 0;
  double temperature = 0;
  double top_p = 1;
  int64_t top_k = 0;
};

// A file with [ids…] or [[ids…]].
Result<std::vector<int32_t>> read_tokens(const std::string& path) {
  ASSIGN_OR_RETURN(const Json json, read_json_file(path));
  const Json& list = json.is_array() && json.size() == 1 && json.front().is_array() ? json.front() : json;
  const auto is_id = [](const Json& v) { return v.is_number_unsigned() && v.get<uint64_t>() <= INT32_MAX; };
  if (!list.is_array() || list.empty() || !std::all_of(list.begin(), list.end(), is_id)) {
    return data_loss(path + ": expected one non-empty array of token ids");
  }
  return list.get<std::vector<int32_t>>();
}

Status fill_prompt(const GenerateFlags& flags, const Tokenizer& tokenizer, GenerationRequest& request) {
  if (!flags.tokens_file.empty()) {
    ASSIGN_OR_RETURN(request.prompt_ids, read_tokens(flags.tokens_file));
    return tokenizer.check_ids(request.prompt_ids);
  }
  if (!flags.chat_file.empty()) {
    ASSIGN_OR_RETURN(const std::string text, read_text_file(flags.chat_file));
    Result<ChatRequest> chat = parse_chat(text);
    if (!chat.ok()) return std::move(chat).error().with_context(flags.chat_file);
    Result<RenderedPrompt> rendered = render_chat(tokenizer, *chat);
    if (!rendered.ok()) return std::move(rendered).error().with_context(flags.chat_file);
    if (rendered->n_images > 0) return unimplemented(flags.chat_file + ": holds an image; only text is generated from");
    request.prompt_ids = std::move(rendered->ids);
    request.format = ReplyFormat::kChat;
    request.starts_in_reasoning = rendered->starts_in_reasoning;
    return ok_status();
  }
  if (flags.prompt.empty()) return invalid_argument("--prompt: is empty; expected some text");
  ASSIGN_OR_RETURN(request.prompt_ids, tokenizer.encode(flags.prompt));
  const auto bos = tokenizer.id_of(kBos);
  if (bos && (request.prompt_ids.empty() || request.prompt_ids.front() != *bos)) {
    request.prompt_ids.insert(request.prompt_ids.begin(), *bos);
  }
  return ok_status();
}

// Prints deltas as they come; reasoning stands between <think> and </think>.
class Printer {
 public:
  void show(const ReplyDelta& delta) {
    if (!delta.reasoning.empty() && !in_reasoning_) put("<think>\n");
    in_reasoning_ = in_reasoning_ || !delta.reasoning.empty();
    put(delta.reasoning);
    if (!delta.content.empty()) close_reasoning();
    put(delta.content);
    std::fflush(stdout);
  }
  void finish() {
    close_reasoning();
    put("\n");
    std::fflush(stdout);
  }

 private:
  void close_reasoning() {
    if (in_reasoning_) put("\n</think>\n");
    in_reasoning_ = false;
  }
  static void put(std::string_view text) { std::fwrite(text.data(), 1, text.size(), stdout); }

  bool in_reasoning_ = false;
};

Result<int> run_generate(const GenerateFlags& flags, CommandContext& context) {
  ASSIGN_OR_RETURN(const std::string dir, resolve_model(flags.model));
  NetworkOptions network;
  network.numerics = *numerics_from_name(flags.numerics);
  network.products = *products_from_name(flags.products);
  network.engram_dir = flags.engram_dir;
  ASSIGN_OR_RETURN(network.device, choose_device(context.common, network.products));
  EngineOptions options;
  options.context = flags.context;

  if (!std::isfinite(flags.temperature) || !std::isfinite(flags.top_p)) {
    return invalid_argument("--temperature, --top-p: expected numbers, found NaN");  // which passes every range check
  }

  // The prompt is read before the weights: a mistake in it should not cost their loading.
  GenerationRequest request;
  {
    ASSIGN_OR_RETURN(const Tokenizer tokenizer, Tokenizer::open(dir + "/tokenizer.json"));
    RETURN_IF_ERROR(fill_prompt(flags, tokenizer, request));
  }
  ASSIGN_OR_RETURN(auto engine, load_engine(dir, network, options, context.pool));
  request.draft = flags.draft == "on";
  if (request.draft && !engine->can_draft()) {
    return failed_precondition("generate: --draft on: the model in '" + dir + "' has no drafter; leave the flag out");
  }
  request.max_tokens = flags.max_tokens;
  request.sampling = {.temperature = flags.temperature, .top_p = flags.top_p, .top_k = flags.top_k, .seed = context.common.seed};
  request.stop = flags.stop;

  Printer printer;
  DeltaSink sink;
  if (!context.common.json) sink = [&printer](const ReplyDelta& delta) { printer.show(delta); };
  ASSIGN_OR_RETURN(const Generation made,
                   engine->generate(request, sink, [&context] { return context.progress.is_cancelled(); }));
  if (!context.common.json) printer.finish();
  if (made.finish_reason == FinishReason::kCancelled) return cancelled("generate: interrupted");
  if (context.common.json) {
    print_json(dump_json(Json{{"text", made.content},
                              {"reasoning", made.reasoning},
                              {"token_ids", made.token_ids},
                              {"finish_reason", finish_reason_name(made.finish_reason)},
                              {"prompt_tokens", made.n_prompt},
                              {"prefill_seconds", made.prefill_seconds},
                              {"decode_seconds", made.decode_seconds},
                              {"tokens_per_second", made.tokens_per_second},
                              {"drafted", made.drafted},
                              {"accepted", made.accepted}}));
  }
  return 0;
}

}  // namespace

void add_generate(CommandTable& table) {
  auto flags = std::make_shared<GenerateFlags>();
  CLI::App* app = table.add("generate", "Generate a reply to a text, a chat or token ids",
                            [flags](CommandContext& context) { return run_generate(*flags, context); });
  table.runs_on_gpu(app);
  app->add_option("model", flags->model, "Folder of a checkpoint or pack, or 'pocket'")->required();
  CLI::Option_group* source = app->add_option_group("Prompt");
  source->add_option("--prompt", flags->prompt, "Text to continue");
  source->add_option("--chat", flags->chat_file, "JSON file: a chat-completions body or its messages array");
  source->add_option("--tokens", flags->tokens_file, "JSON file: an array of token ids");
  source->require_option(1);
  app->add_option("--max-tokens", flags->max_tokens, "Most tokens of the reply")->required()->check(CLI::PositiveNumber);
  app->add_option("--temperature", flags->temperature, "0 takes the most likely token")->capture_default_str()->check(CLI::Range(0.0, 2.0));
  app->add_option("--top-p", flags->top_p, "Sample from the most likely tokens with this mass")
      ->capture_default_str()
      ->check(CLI::Range(1e-9, 1.0));
  app->add_option("--top-k", flags->top_k, "Sample from this many tokens; 0: all")->capture_default_str()->check(CLI::NonNegativeNumber);
  app->add_option("--stop", flags->stop, "String that ends the reply; may be repeated");
  app->add_option("--draft", flags->draft, "Speculative drafting; the same text, other speed")
      ->capture_default_str()
      ->check(CLI::IsMember({"on", "off"}));
  app->add_option("--context", flags->context, "Most tokens of prompt and reply (default: the model's, at most 32768)")
      ->check(CLI::PositiveNumber);
  app->add_option("--numerics", flags->numerics, "full, kvq or vendor")
      ->capture_default_str()
      ->check(CLI::IsMember({"full", "kvq", "vendor"}));
  app->add_option("--products", flags->products, "Products with EXL3 mul1 weights: exact, or in integers (faster, rounded): int8, int8r")
      ->capture_default_str()
      ->check(CLI::IsMember({"exact", "int8", "int8r"}));
  app->add_option("--engram", flags->engram_dir, "Another folder that holds the Engram shards");
}

}  // namespace espalier::app
