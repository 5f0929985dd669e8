#include "serve/service.h"

#include <chrono>
#include <nlohmann/json.hpp>
#include <utility>

#include "format/json.h"

namespace espalier {
namespace {

constexpr std::string_view kModelPrefix = "/v1/models/";

enum class RouteKind { kUnknown, kHealth, kGet, kChat, kCompletions };

RouteKind kind_of(const std::string& path) {
  if (path == "/health" || path == "/v1/health" || path == "/ready") return RouteKind::kHealth;
  if (path == "/v1/models" || path == "/models" || path == "/version") return RouteKind::kGet;
  if (path.size() > kModelPrefix.size() && path.compare(0, kModelPrefix.size(), kModelPrefix) == 0) return RouteKind::kGet;
  if (path == "/v1/chat/completions" || path == "/chat/completions") return RouteKind::kChat;
  if (path == "/v1/completions" || path == "/completions") return RouteKind::kCompletions;
  return RouteKind::kUnknown;
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// "Bearer KEY" (any case of the scheme), or x-api-key.
std::string_view presented_key(const RequestHead& head) {
  constexpr std::string_view kScheme = "bearer ";
  std::string_view value = head.authorization;
  if (value.size() > kScheme.size()) {
    bool is_bearer = true;
    for (size_t i = 0; i < kScheme.size(); ++i) is_bearer &= static_cast<char>(value[i] | 0x20) == kScheme[i];
    if (is_bearer) return value.substr(kScheme.size());
  }
  return head.x_api_key;
}

}  // namespace

std::string path_of(std::string_view target) {
  target = target.substr(0, target.find_first_of("?#"));
  std::string path;
  for (size_t i = 0; i < target.size(); ++i) {
    const int high = i + 2 < target.size() && target[i] == '%' ? hex_digit(target[i + 1]) : -1;
    const int low = high >= 0 ? hex_digit(target[i + 2]) : -1;
    if (low >= 0) {
      path += static_cast<char>(high * 16 + low);
      i += 2;
    } else {
      path += target[i];
    }
  }
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

Service::Service(const TextGenerator& generator, ServiceOptions options)
    : generator_(generator), options_(std::move(options)) {}

std::variant<Endpoint, HttpReply> Service::route(const RequestHead& head) const {
  const std::string path = path_of(head.target);
  const RouteKind kind = kind_of(path);
  const bool is_call = kind == RouteKind::kChat || kind == RouteKind::kCompletions;
  if (kind == RouteKind::kUnknown) {
    return error_reply({.status = 404, .message = "No route '" + path + "'; see docs/api.md for the routes of this server."});
  }
  const std::string allow = is_call ? "POST, OPTIONS" : "GET, HEAD, OPTIONS";
  if (head.method == "OPTIONS") return HttpReply{.status = 204, .body = "", .headers = {{"Allow", allow}}};
  const bool method_fits = is_call ? head.method == "POST" : head.method == "GET" || head.method == "HEAD";
  if (!method_fits) {
    return error_reply({.status = 405,
                        .message = "'" + path + "' takes " + allow + ", not " + head.method + ".",
                        .allow = allow});
  }
  if (kind == RouteKind::kHealth) {
    if (draining_) return error_reply(shutting_down());
    return HttpReply{.body = R"({"status":"ok"})"};
  }
  if (options_.keys.required() && !options_.keys.accepts(presented_key(head))) {
    return error_reply({.status = 401,
                        .message = "A valid API key is required: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
                        .code = "invalid_api_key"});
  }
  if (!is_call) return answer_get(path);
  if (draining_) return error_reply(shutting_down());
  if (!head.content_encoding.empty() && head.content_encoding != "identity") {
    return error_reply({.status = 415,
                        .message = "Content-Encoding '" + head.content_encoding + "' is not supported; send the body plain."});
  }
  return kind == RouteKind::kChat ? Endpoint::kChatCompletions : Endpoint::kCompletions;
}

HttpReply Service::answer_get(const std::string& path) const {
  const ModelCard card{options_.rules.served_name, options_.created, generator_.context()};
  if (path == "/version") return {.body = dump_json(Json{{"version", options_.version}})};
  if (path.compare(0, kModelPrefix.size(), kModelPrefix) != 0) return {.body = models_body({card})};
  const std::string id = path.substr(kModelPrefix.size());
  if (id != card.id) return error_reply(model_not_found(id, card.id));
  return {.body = model_body(card)};
}

Outcome<PreparedCall> Service::prepare(Endpoint endpoint, std::string_view body) const {
  const bool is_chat = endpoint == Endpoint::kChatCompletions;
  Outcome<Call> parsed = is_chat ? parse_chat_call(body, options_.rules) : parse_completion_call(body, options_.rules);
  if (auto* error = std::get_if<ApiError>(&parsed)) return std::move(*error);
  Call& call = std::get<Call>(parsed);
  if (auto error = build_prompt(call, options_.rules, generator_.tokenizer(), generator_.context())) return std::move(*error);
  PreparedCall prepared;
  if (!call.has_seed) call.generation.sampling.seed = random_seed();
  prepared.head.id = (is_chat ? "chatcmpl-" : "cmpl-") + random_name(24);
  prepared.head.created =
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  prepared.head.model = options_.rules.served_name;
  prepared.head.is_chat = is_chat;
  prepared.head.thinking = is_chat && std::get<ChatRequest>(call.prompt).thinking;
  prepared.head.include_usage = call.include_usage;
  prepared.head.seed = call.generation.sampling.seed;
  prepared.generation = std::move(call.generation);
  prepared.stream = call.stream;
  return prepared;
}

}  // namespace espalier
