#include "serve/request.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "serve/fields.h"

namespace espalier {
namespace {

constexpr int64_t kMaxTokens = int64_t{1} << 31;
constexpr size_t kMaxStops = 16;
constexpr size_t kMaxStopBytes = 1024;
constexpr size_t kMaxStopIds = 64;
constexpr double kDefaultTemperature = 1.0;
constexpr double kDefaultTopP = 0.95;
constexpr std::string_view kBos = "<｜begin▁of▁sentence｜>";

// A field whose presence with another value than these would change the reply in a way that is not served.
struct Refused {
  std::string_view name;
  Json harmless;  // this value (or null, or an empty array or object) is accepted
  std::string_view advice;
};

bool is_harmless(const Json& value, const Json& harmless) {
  if ((value.is_array() || value.is_object()) && value.empty()) return true;
  if (value.is_number() && harmless.is_number()) return value.get<double>() == harmless.get<double>();
  return value == harmless;
}

void refuse_unserved(Fields& fields, const std::vector<Refused>& list) {
  for (const Refused& refused : list) {
    const Json* value = fields.find(refused.name);
    if (value == nullptr || is_harmless(*value, refused.harmless)) continue;
    const std::string name(refused.name);
    ApiError error = unsupported(name, name + ": is not supported by this server; " + std::string(refused.advice));
    if (refused.harmless.is_null()) error.code = "unsupported_parameter";
    fields.fail(std::move(error));
  }
}

const std::vector<Refused>& refused_everywhere() {
  static const std::vector<Refused> list = {
      {"n", 1, "send one request per choice"},
      {"best_of", 1, "send one request per choice"},
      {"presence_penalty", 0, "leave it out or send 0"},
      {"frequency_penalty", 0, "leave it out or send 0"},
      {"repetition_penalty", 1, "leave it out or send 1"},
      {"logit_bias", nullptr, "leave it out"},
      {"prompt_logprobs", nullptr, "leave it out"},
  };
  return list;
}

const std::vector<Refused>& refused_in_chat() {
  static const std::vector<Refused> list = {
      {"logprobs", false, "leave it out or send false"},
      {"top_logprobs", 0, "leave it out"},
      {"tools", nullptr, "send the conversation without tools"},
      {"functions", nullptr, "send the conversation without functions"},
      {"response_format", Json{{"type", "text"}}, "ask for the format in the prompt"},
      {"thinking_budget", nullptr, "use max_tokens or reasoning_effort"},
      {"audio", nullptr, "only text is served"},
      {"modalities", Json::array({"text"}), "only text is served"},
      {"web_search_options", nullptr, "leave it out"},
  };
  return list;
}

const std::vector<Refused>& refused_in_completions() {
  static const std::vector<Refused> list = {
      {"logprobs", nullptr, "leave it out"},
      {"echo", false, "leave it out or send false; the prompt is not repeated"},
      {"suffix", "", "leave it out; filling in the middle is not served"},
  };
  return list;
}

void read_stops(Fields& fields, GenerationRequest& out) {
  const Json* stop = fields.find("stop");
  if (stop == nullptr) return;
  const Json list = stop->is_string() ? Json::array({*stop}) : *stop;
  const auto fail = [&](const std::string& found) {
    fields.fail(bad_field("stop", "stop: expected a string or up to " + std::to_string(kMaxStops) +
                                      " non-empty strings of at most " + std::to_string(kMaxStopBytes) + " bytes, found " + found));
  };
  if (!list.is_array()) return fail(json_kind(*stop));
  if (list.size() > kMaxStops) return fail(std::to_string(list.size()) + " entries");
  for (const Json& entry : list) {
    if (!entry.is_string()) return fail(json_kind(entry) + " in the list");
    const auto& text = entry.get_ref<const std::string&>();
    if (text.empty()) return fail("an empty string");
    if (text.size() > kMaxStopBytes) return fail("a string of " + std::to_string(text.size()) + " bytes");
    out.stop.push_back(text);
  }
}

void read_stop_ids(Fields& fields, GenerationRequest& out) {
  const Json* ids = fields.find("stop_token_ids");
  if (ids == nullptr) return;
  const auto is_id = [](const Json& v) { return v.is_number_unsigned() && v.get<uint64_t>() <= INT32_MAX; };
  if (!ids->is_array() || ids->size() > kMaxStopIds || !std::all_of(ids->begin(), ids->end(), is_id)) {
    return fields.fail(bad_field("stop_token_ids", "stop_token_ids: expected an array of up to " + std::to_string(kMaxStopIds) +
                                                       " token ids, found " + json_kind(*ids)));
  }
  for (const Json& id : *ids) out.stop_token_ids.push_back(id.get<int32_t>());
}

// The fields that both routes share.
void read_common(Fields& fields, const CallRules& rules, Call& call) {
  GenerationRequest& g = call.generation;
  const auto max_completion = fields.integer("max_completion_tokens", 1, kMaxTokens);
  const auto max_tokens = fields.integer("max_tokens", 1, kMaxTokens);
  g.max_tokens = max_completion ? *max_completion : max_tokens.value_or(0);
  g.min_tokens = fields.integer("min_tokens", 0, kMaxTokens).value_or(0);
  g.sampling.temperature = fields.number("temperature", 0, 2).value_or(kDefaultTemperature);
  g.sampling.top_p = fields.number("top_p", 0, 1, true).value_or(kDefaultTopP);
  g.sampling.top_k = fields.integer("top_k", -1, INT32_MAX).value_or(0);
  g.sampling.min_p = fields.number("min_p", 0, 1).value_or(0);
  if (const auto seed = fields.integer("seed", INT64_MIN, INT64_MAX); seed && *seed != -1) {
    g.sampling.seed = static_cast<uint64_t>(*seed);
    call.has_seed = true;
  }
  g.ignore_eos = fields.boolean("ignore_eos").value_or(false);
  g.draft = rules.default_draft;
  read_stops(fields, g);
  read_stop_ids(fields, g);
  call.stream = fields.boolean("stream").value_or(false);
  if (const Json* options = fields.find("stream_options")) {
    if (!options->is_object()) {
      fields.fail(bad_field("stream_options", "stream_options: expected an object, found " + json_kind(*options)));
    } else {
      Fields nested(*options);
      call.include_usage = nested.boolean("include_usage").value_or(false);
      if (nested.error()) fields.fail(bad_field("stream_options", "stream_options." + nested.error()->message));
    }
  }
  refuse_unserved(fields, refused_everywhere());
}

// The body as an object, with its model checked; nothing else is looked at before that.
Outcome<Json> open_body(std::string_view body, const CallRules& rules) {
  Result<Json> parsed = parse_json(body, "request body");
  if (!parsed.ok()) return ApiError{.message = parsed.error().message()};
  if (!parsed->is_object()) {
    return ApiError{.message = "request body: expected a JSON object, found " + json_kind(*parsed)};
  }
  Fields fields(*parsed);
  const auto model = fields.text("model");
  if (fields.error()) return *fields.error();
  if (model && *model != rules.served_name && !rules.accept_any_model) return model_not_found(*model, rules.served_name);
  return std::move(*parsed);
}

// "messages[2].content: expected …" -> "messages[2].content"
std::string param_of(const std::string& message) {
  const size_t end = message.find(':');
  if (end == std::string::npos || message.substr(0, end).find(' ') != std::string::npos) return "messages";
  return message.substr(0, end);
}

// One list of ids; false when it is not one.
bool read_ids(const Json& list, std::vector<int32_t>& ids) {
  for (const Json& id : list) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() > INT32_MAX) return false;
    ids.push_back(id.get<int32_t>());
  }
  return true;
}

// "prompt": a string, token ids, or a list with exactly one of these.
void read_prompt(Fields& fields, RawPrompt& prompt) {
  constexpr std::string_view kExpected = "prompt: expected a non-empty string or a non-empty array of token ids, found ";
  const auto fail = [&](const std::string& found) { fields.fail(bad_field("prompt", std::string(kExpected) + found)); };
  const Json* value = fields.find("prompt");
  if (value == nullptr) return fail("nothing");
  if (value->is_array() && !value->empty() && (value->front().is_string() || value->front().is_array())) {
    if (value->size() > 1) {
      return fields.fail(unsupported("prompt", "prompt: has " + std::to_string(value->size()) +
                                                   " prompts; this server takes one per request"));
    }
    value = &value->front();
  }
  if (value->is_string()) {
    prompt.text = value->get<std::string>();
    if (prompt.text.empty()) fail("an empty string");
  } else if (value->is_array()) {
    if (value->empty()) return fail("an empty array");
    if (!read_ids(*value, prompt.ids)) fail("an array with something else than token ids");
  } else {
    fail(json_kind(*value));
  }
}

}  // namespace

Outcome<Call> parse_chat_call(std::string_view body, const CallRules& rules) {
  Outcome<Json> opened = open_body(body, rules);
  if (auto* error = std::get_if<ApiError>(&opened)) return std::move(*error);
  const Json& json = std::get<Json>(opened);
  Fields fields(json);
  Call call;
  read_common(fields, rules, call);
  refuse_unserved(fields, refused_in_chat());
  const Json* messages = fields.find("messages");
  if (messages == nullptr || !messages->is_array() || messages->empty()) {
    fields.fail(bad_field("messages", "messages: expected a non-empty array of messages, found " +
                                          (messages == nullptr     ? std::string("nothing")
                                           : messages->is_array() ? std::string("an empty array")
                                                                  : json_kind(*messages))));
  }
  if (fields.error()) return *fields.error();
  Result<ChatRequest> chat = parse_chat_json(json);
  if (!chat.ok()) {
    ApiError error = error_from_status(chat.error());
    if (error.status == 400) error.param = param_of(error.message);
    return error;
  }
  for (const ChatMessage& message : chat->messages) {
    if (std::any_of(message.content.begin(), message.content.end(), [](const ChatPart& part) { return part.is_image; })) {
      return unsupported("messages", "messages: hold an image; only text is served");
    }
  }
  call.prompt = std::move(*chat);
  return call;
}

Outcome<Call> parse_completion_call(std::string_view body, const CallRules& rules) {
  Outcome<Json> opened = open_body(body, rules);
  if (auto* error = std::get_if<ApiError>(&opened)) return std::move(*error);
  Fields fields(std::get<Json>(opened));
  Call call;
  RawPrompt prompt;
  read_common(fields, rules, call);
  refuse_unserved(fields, refused_in_completions());
  read_prompt(fields, prompt);
  prompt.add_bos = fields.boolean("add_special_tokens").value_or(true);
  if (fields.error()) return *fields.error();
  call.prompt = std::move(prompt);
  return call;
}

std::optional<ApiError> build_prompt(Call& call, const CallRules& rules, const Tokenizer& tokenizer, int64_t context) {
  GenerationRequest& g = call.generation;
  const char* param = "prompt";
  if (const auto* chat = std::get_if<ChatRequest>(&call.prompt)) {
    param = "messages";
    Result<RenderedPrompt> rendered = render_chat(tokenizer, *chat);
    if (!rendered.ok()) {
      ApiError error = error_from_status(rendered.error());
      if (error.status == 400) error.param = param;
      return error;
    }
    g.prompt_ids = std::move(rendered->ids);
    g.format = ReplyFormat::kChat;
    g.starts_in_reasoning = rendered->starts_in_reasoning;
  } else {
    const RawPrompt& raw = std::get<RawPrompt>(call.prompt);
    g.format = ReplyFormat::kRaw;
    g.prompt_ids = raw.ids;
    if (raw.ids.empty()) {
      Result<std::vector<int32_t>> ids = tokenizer.encode(raw.text);
      if (!ids.ok()) return error_from_status(ids.error());
      g.prompt_ids = std::move(*ids);
      const auto bos = tokenizer.id_of(kBos);
      if (raw.add_bos && bos && (g.prompt_ids.empty() || g.prompt_ids.front() != *bos)) {
        g.prompt_ids.insert(g.prompt_ids.begin(), *bos);
      }
    }
  }
  if (const Status known = tokenizer.check_ids(g.prompt_ids); !known.ok()) return bad_field(param, "prompt: " + known.message());
  if (const Status known = tokenizer.check_ids(g.stop_token_ids); !known.ok()) {
    return bad_field("stop_token_ids", "stop_token_ids: " + known.message());
  }
  const auto n_prompt = static_cast<int64_t>(g.prompt_ids.size());
  const int64_t n_reply = std::max<int64_t>(g.max_tokens, 1);
  if (n_prompt + 1 > context || (n_prompt + n_reply > context && !rules.clamp_max_tokens)) {
    return context_too_long(param, context, n_prompt, n_reply);
  }
  return std::nullopt;
}

}  // namespace espalier
