// Reads the bodies of /v1/chat/completions and /v1/completions into what the engine needs, in two steps: parse_* looks at the
// bytes only (fields, types, ranges, model name); build_prompt renders, tokenises and checks the context.
//
// Unknown fields are ignored; fields of the protocol that would change the reply but are not served are refused by name.
// Source: docs/api.md, "Chat completions" and "Completions".
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "runtime/generation.h"
#include "serve/api_error.h"
#include "text/chat.h"
#include "text/tokenizer.h"

namespace espalier {

// The server's side of validation.
struct CallRules {
  std::string served_name = {};
  bool accept_any_model = false;  // the request's "model" is not compared
  bool clamp_max_tokens = false;  // a max_tokens that does not fit is lowered instead of refused
  bool default_draft = false;
};

struct RawPrompt {
  std::string text;          // used when ids is empty
  std::vector<int32_t> ids;
  bool add_bos = true;       // text only; never doubles a BOS that the text already starts with
};

// A parsed request. `generation.prompt_ids` is filled by build_prompt.
struct Call {
  std::variant<ChatRequest, RawPrompt> prompt;
  GenerationRequest generation;
  bool has_seed = false;
  bool stream = false;
  bool include_usage = false;
  bool is_chat() const { return std::holds_alternative<ChatRequest>(prompt); }
};

template <typename T>
using Outcome = std::variant<T, ApiError>;

// Threads: pure. Any bytes end in a Call or an ApiError (fuzz target tests/fuzz/http_body_fuzz.cpp).
Outcome<Call> parse_chat_call(std::string_view body, const CallRules& rules);
Outcome<Call> parse_completion_call(std::string_view body, const CallRules& rules);

// Fills call.generation.prompt_ids, format and start state; refuses prompts that do not fit `context` with the reply asked for.
std::optional<ApiError> build_prompt(Call& call, const CallRules& rules, const Tokenizer& tokenizer, int64_t context);

}  // namespace espalier
