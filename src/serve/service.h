// The API behind the HTTP server: which route a request means, whether its caller may use it, and what a call asks of the engine.
// Knows nothing of sockets; server.cpp moves the bytes. Source: docs/api.md, "Routes".
#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "runtime/generation.h"
#include "serve/api_keys.h"
#include "serve/http_types.h"
#include "serve/request.h"
#include "serve/response.h"

namespace espalier {

struct ServiceOptions {
  CallRules rules = {};
  ApiKeys keys = {};
  int64_t created = 0;  // Unix time of the model card
  std::string version = {};  // of this program
};

enum class Endpoint { kChatCompletions, kCompletions };

// A call that may go to the engine.
struct PreparedCall {
  ReplyHead head;
  GenerationRequest generation;
  bool stream = false;
};

class Service {
 public:
  // The generator must outlive the service; only its tokenizer() and context() are used here.
  Service(const TextGenerator& generator, ServiceOptions options);

  // Decides by the head alone, before a body is read: the endpoint that wants the body, or the finished reply.
  // Order: route (404), method (405), key (401), draining (503), coding of the body (415).
  std::variant<Endpoint, HttpReply> route(const RequestHead& head) const;

  // Parses and renders the body. Threads: any. Cost: that of tokenising the prompt.
  Outcome<PreparedCall> prepare(Endpoint endpoint, std::string_view body) const;

  // From now on /health says 503 and calls are refused.
  void start_draining() { draining_ = true; }

  const std::string& version() const { return options_.version; }

 private:
  HttpReply answer_get(const std::string& path) const;

  const TextGenerator& generator_;
  ServiceOptions options_;
  std::atomic<bool> draining_{false};
};

// The path of a request target: no query, no trailing slashes, percent-decoded. Bad escapes stay as they are.
std::string path_of(std::string_view target);

}  // namespace espalier
