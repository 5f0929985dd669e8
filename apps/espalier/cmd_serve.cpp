// espalier serve MODEL: the HTTP API over one model.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "apps/espalier/command.h"
#include "base/log.h"
#include "format/json.h"
#include "model/numerics.h"
#include "runtime/network.h"
#include "serve/server.h"

namespace espalier::app {
namespace {

struct ServeFlags {
  std::string model;
  std::string engram_dir;
  std::string served_name;
  std::string api_key_file;
  std::string numerics = "kvq";
  std::string products = "exact";
  std::string draft = "off";
  int64_t context = 0;
  int max_body_mib = 16;
  bool any_model = false;
  bool clamp_max_tokens = false;
  ServerOptions server;
};

// The name of the model's folder, when no --served-name is given.
std::string default_name(const ServeFlags& flags, const std::string& dir) {
  if (flags.model == "pocket") return "pocket";
  const auto path = std::filesystem::weakly_canonical(dir);
  return path.filename().empty() ? "model" : path.filename().string();
}

Result<int> run_serve(const ServeFlags& flags, CommandContext& context) {
  ASSIGN_OR_RETURN(const std::string dir, resolve_model(flags.model));
  ServiceOptions service_options;
  if (!flags.api_key_file.empty()) {
    ASSIGN_OR_RETURN(service_options.keys, ApiKeys::load(flags.api_key_file));
  }
  service_options.rules.served_name = flags.served_name.empty() ? default_name(flags, dir) : flags.served_name;
  service_options.rules.accept_any_model = flags.any_model;
  service_options.rules.clamp_max_tokens = flags.clamp_max_tokens;
  service_options.rules.default_draft = flags.draft == "on";
  service_options.created = static_cast<int64_t>(std::time(nullptr));
  service_options.version = ESPALIER_VERSION;

  NetworkOptions network;
  network.numerics = *numerics_from_name(flags.numerics);
  network.products = *products_from_name(flags.products);
  network.engram_dir = flags.engram_dir;
  ASSIGN_OR_RETURN(network.device, choose_device(context.common, network.products));
  EngineOptions engine_options;
  engine_options.context = flags.context;
  ASSIGN_OR_RETURN(auto engine, load_engine(dir, network, engine_options, context.pool));
  if (flags.draft == "on" && !engine->can_draft()) {
    return failed_precondition("serve: --draft on: the model in '" + dir + "' has no drafter; leave the flag out");
  }

  ServerOptions options = flags.server;
  options.max_body_bytes = static_cast<uint64_t>(flags.max_body_mib) << 20;
  const std::string name = service_options.rules.served_name;
  const bool has_keys = service_options.keys.required();
  Service service(*engine, std::move(service_options));
  RequestLog log;
  if (!context.common.quiet) {
    log = [](const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); };
  }
  ASSIGN_OR_RETURN(auto server, Server::open(service, *engine, options, std::move(log)));
  if (!has_keys && options.host != "127.0.0.1" && options.host != "localhost" && options.host != "::1") {
    espalier::log(LogLevel::kWarning, "serving on " + options.host + " without --api-key-file: everyone who reaches it may call");
  }
  if (context.common.json) {
    print_json(dump_json(Json{{"url", server->url()}, {"model", name}, {"context", engine->context()}}));
  } else {
    std::printf("Serving %s at %s (context %lld tokens). Ctrl-C stops.\n", name.c_str(), server->url().c_str(),
                static_cast<long long>(engine->context()));
    std::fflush(stdout);
  }
  RETURN_IF_ERROR(server->run([&context] { return context.progress.is_cancelled(); }));
  return 0;
}

}  // namespace

void add_serve(CommandTable& table) {
  auto flags = std::make_shared<ServeFlags>();
  CLI::App* app = table.add("serve", "Serve a model over HTTP (OpenAI's API)",
                            [flags](CommandContext& context) { return run_serve(*flags, context); });
  table.runs_on_gpu(app);
  app->add_option("model", flags->model, "Folder of a checkpoint or pack, or 'pocket'")->required();
  app->add_option("--host", flags->server.host, "Address to listen on")->capture_default_str();
  app->add_option("--port", flags->server.port, "Port; 0 picks a free one")->capture_default_str()->check(CLI::Range(0, 65535));
  app->add_option("--served-name", flags->served_name, "Model name in the API (default: the folder's name)");
  app->add_flag("--any-model", flags->any_model, "Accept every model name in requests");
  app->add_option("--context", flags->context, "Most tokens of prompt and reply (default: the model's, at most 32768)")
      ->check(CLI::PositiveNumber);
  app->add_flag("--clamp-max-tokens", flags->clamp_max_tokens, "Lower a max_tokens that does not fit instead of refusing it");
  app->add_option("--numerics", flags->numerics, "full, kvq or vendor")
      ->capture_default_str()
      ->check(CLI::IsMember({"full", "kvq", "vendor"}));
  app->add_option("--products", flags->products, "Products with EXL3 mul1 weights: exact, or in integers (faster, rounded): int8, int8r")
      ->capture_default_str()
      ->check(CLI::IsMember({"exact", "int8", "int8r"}));
  app->add_option("--engram", flags->engram_dir, "Another folder that holds the Engram shards");
  app->add_option("--draft", flags->draft, "Speculative drafting; the same text, other speed")
      ->capture_default_str()
      ->check(CLI::IsMember({"on", "off"}));
  app->add_option("--api-key-file", flags->api_key_file, "One accepted key a line; without it everyone may call");
  app->add_option("--max-queue", flags->server.max_queue, "Requests that may wait")->capture_default_str()->check(CLI::Range(0, 100000));
  app->add_option("--max-body-mib", flags->max_body_mib, "Largest request body")->capture_default_str()->check(CLI::Range(1, 1024));
  app->add_option("--keepalive-seconds", flags->server.keepalive_seconds, "Silence in a stream before a comment is sent")
      ->capture_default_str()
      ->check(CLI::Range(0.05, 600.0));
  app->add_option("--drain-seconds", flags->server.drain_seconds, "Time for the running request after a stop")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 3600.0));
}

}  // namespace espalier::app
