#include "serve/api_error.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "format/json.h"

namespace espalier {

ApiError bad_field(std::string param, std::string message) {
  return {.message = std::move(message), .param = std::move(param)};
}

ApiError unsupported(std::string param, std::string message) {
  return {.message = std::move(message), .param = std::move(param), .code = "unsupported_value"};
}

ApiError context_too_long(std::string param, long n_context, long n_prompt, long n_reply) {
  return {.message = "This model's maximum context length is " + std::to_string(n_context) + " tokens. The prompt has " +
                     std::to_string(n_prompt) + " tokens and the reply asks for " + std::to_string(n_reply) +
                     "; shorten the conversation or lower max_tokens.",
          .param = std::move(param),
          .code = "context_length_exceeded"};
}

ApiError model_not_found(const std::string& asked, const std::string& served) {
  return {.status = 404,
          .message = "The model '" + asked + "' does not exist; this server has '" + served + "'.",
          .param = "model",
          .code = "model_not_found"};
}

ApiError queue_full(int max_queue, int retry_after_seconds) {
  return {.status = 429,
          .message = "The queue is full (" + std::to_string(max_queue) + " requests wait); try again later.",
          .type = "rate_limit_error",
          .code = "rate_limit_exceeded",
          .retry_after_seconds = retry_after_seconds};
}

ApiError shutting_down() {
  return {.status = 503,
          .message = "The server is shutting down.",
          .type = "server_error",
          .code = "draining",
          .retry_after_seconds = 10};
}

ApiError body_too_large(unsigned long long limit_bytes) {
  return {.status = 413,
          .message = "The request body is larger than " + std::to_string(limit_bytes) + " bytes.",
          .code = "request_too_large"};
}

ApiError head_too_large(std::string limit) {
  return {.status = 431, .message = "The request head has more than " + limit + "."};
}

ApiError body_too_slow() { return {.status = 408, .message = "The request body took too long to arrive."}; }

ApiError error_from_status(const Status& status) {
  ApiError error{.message = status.message()};
  switch (status.code()) {
    case StatusCode::kInvalidArgument: return error;
    case StatusCode::kUnimplemented: error.code = "unsupported_value"; return error;
    case StatusCode::kNotFound: error.status = 404; return error;
    case StatusCode::kResourceExhausted:
    case StatusCode::kUnavailable:
      error.status = 503;
      error.type = "server_error";
      error.code = "overloaded";
      error.retry_after_seconds = 5;
      return error;
    case StatusCode::kDeadlineExceeded:
      error.status = 504;
      error.type = "server_error";
      error.code = "timeout";
      return error;
    case StatusCode::kOk:
    case StatusCode::kDataLoss:
    case StatusCode::kFailedPrecondition:
    case StatusCode::kCancelled:
    case StatusCode::kInternal: break;
  }
  error.status = 500;
  error.type = "server_error";
  error.code = "internal_error";
  return error;
}

std::string error_body(const ApiError& error) {
  const auto or_null = [](const std::string& s) { return s.empty() ? Json(nullptr) : Json(s); };
  const Json body = {{"error",
                      {{"message", error.message},
                       {"type", error.type},
                       {"param", or_null(error.param)},
                       {"code", or_null(error.code)}}}};
  return dump_json(body);
}

}  // namespace espalier
