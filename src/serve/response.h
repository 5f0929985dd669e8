// Builds the JSON of replies and the events of streams. One reply has one id, creation time and model name in all its parts.
// Source: docs/api.md, "Replies" and "Streams"; the shapes are OpenAI's, with DeepSeek's reasoning_content.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/generation.h"
#include "serve/api_error.h"

namespace espalier {

struct ReplyHead {
  std::string id = {};  // "chatcmpl-…" or "cmpl-…"
  int64_t created = 0;
  std::string model = {};
  bool is_chat = true;
  bool thinking = false;       // reasoning fields are present even when empty
  bool include_usage = false;  // streams: a last chunk with usage, "usage": null before
  uint64_t seed = 0;           // reported as x_seed
};

// The whole reply as one JSON object.
std::string reply_body(const ReplyHead& head, const Generation& generation);

// Events of a stream, each "data: <one line of JSON>\n\n".
std::string opening_event(const ReplyHead& head);  // empty for completions
// One event per kind of text in the delta; reasoning and content are never mixed in one.
std::string delta_events(const ReplyHead& head, const ReplyDelta& delta);
// finish_reason, then usage when asked for, then [DONE].
std::string closing_events(const ReplyHead& head, const Generation& generation);
// An error after the stream has begun, then [DONE].
std::string error_events(const ApiError& error);
// A comment that keeps connections open while nothing is ready.
inline constexpr std::string_view kKeepAliveEvent = ": keepalive\n\n";

struct ModelCard {
  std::string id = {};
  int64_t created = 0;
  int64_t context = 0;
};
std::string models_body(const std::vector<ModelCard>& models);
std::string model_body(const ModelCard& model);

}  // namespace espalier
