// What a client is told when its request cannot be served: an HTTP status and OpenAI's error envelope.
// One table maps the library's status codes to HTTP. Source: docs/api.md, "Errors".
#pragma once

#include <string>

#include "base/status.h"

namespace espalier {

struct ApiError {
  int status = 400;
  std::string message = {};
  std::string type = "invalid_request_error";
  std::string param = {};  // the request field at fault; empty: null
  std::string code = {};   // for programs; empty: null
  int retry_after_seconds = 0;  // > 0: Retry-After and retry-after-ms are sent
  std::string allow = {};       // with 405: the methods that the route takes
};

// 400 about one field.
ApiError bad_field(std::string param, std::string message);
// 400 about a field or value that is valid in the protocol but not served here.
ApiError unsupported(std::string param, std::string message);
// 400 when prompt and reply do not fit: clients compact the conversation on this code.
ApiError context_too_long(std::string param, long n_context, long n_prompt, long n_reply);
ApiError model_not_found(const std::string& asked, const std::string& served);
ApiError queue_full(int max_queue, int retry_after_seconds);
ApiError shutting_down();
ApiError body_too_large(unsigned long long limit_bytes);  // 413
ApiError head_too_large(std::string limit);                // 431; "65536 bytes", "200 fields"
ApiError body_too_slow();                                  // 408

// The status-code table.
ApiError error_from_status(const Status& status);

// {"error":{"message","type","param","code"}}
std::string error_body(const ApiError& error);

}  // namespace espalier
