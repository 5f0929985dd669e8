#include "serve/response.h"

#include <nlohmann/json.hpp>

#include "format/json.h"

namespace espalier {
namespace {

Json usage_of(const Generation& g) {
  const auto n_completion = static_cast<int64_t>(g.token_ids.size());
  return {{"prompt_tokens", g.n_prompt},
          {"completion_tokens", n_completion},
          {"total_tokens", g.n_prompt + n_completion},
          {"prompt_tokens_details", {{"cached_tokens", 0}}},
          {"completion_tokens_details", {{"reasoning_tokens", g.n_reasoning}}}};
}

Json stop_reason_of(const Generation& g) {
  if (!g.stop_string.empty()) return g.stop_string;
  if (g.stop_token >= 0) return g.stop_token;
  return nullptr;
}

Json envelope(const ReplyHead& head, const char* chat_object) {
  return {{"id", head.id},
          {"object", head.is_chat ? chat_object : "text_completion"},
          {"created", head.created},
          {"model", head.model}};
}

std::string event(const Json& data) { return "data: " + dump_json(data) + "\n\n"; }

// One chunk of a stream. `delta` is the chat delta, or the text of a completion.
std::string chunk(const ReplyHead& head, Json delta, Json finish_reason, Json stop_reason) {
  Json data = envelope(head, "chat.completion.chunk");
  Json choice = {{"index", 0}};
  choice[head.is_chat ? "delta" : "text"] = std::move(delta);
  choice["logprobs"] = nullptr;
  choice["finish_reason"] = finish_reason;
  if (!finish_reason.is_null()) choice["stop_reason"] = std::move(stop_reason);
  data["choices"] = Json::array({std::move(choice)});
  if (head.include_usage) data["usage"] = nullptr;
  return event(data);
}

Json card(const ModelCard& model) {
  return {{"id", model.id},         {"object", "model"}, {"created", model.created},       {"owned_by", "espalier"},
          {"root", model.id},       {"parent", nullptr}, {"max_model_len", model.context}};
}

}  // namespace

std::string reply_body(const ReplyHead& head, const Generation& generation) {
  Json body = envelope(head, "chat.completion");
  Json choice = {{"index", 0}};
  if (head.is_chat) {
    Json message = {{"role", "assistant"}, {"content", generation.content}};
    if (head.thinking || !generation.reasoning.empty()) {
      message["reasoning_content"] = generation.reasoning;
      message["reasoning"] = generation.reasoning;
    }
    message["refusal"] = nullptr;
    choice["message"] = std::move(message);
  } else {
    choice["text"] = generation.content;
  }
  choice["logprobs"] = nullptr;
  choice["finish_reason"] = finish_reason_name(generation.finish_reason);
  choice["stop_reason"] = stop_reason_of(generation);
  body["choices"] = Json::array({std::move(choice)});
  body["usage"] = usage_of(generation);
  body["x_seed"] = head.seed;
  return dump_json(body);
}

std::string opening_event(const ReplyHead& head) {
  if (!head.is_chat) return {};
  return chunk(head, {{"role", "assistant"}, {"content", ""}}, nullptr, nullptr);
}

std::string delta_events(const ReplyHead& head, const ReplyDelta& delta) {
  std::string events;
  if (!delta.reasoning.empty()) {
    events += chunk(head, {{"reasoning_content", delta.reasoning}, {"reasoning", delta.reasoning}}, nullptr, nullptr);
  }
  if (!delta.content.empty()) {
    events += head.is_chat ? chunk(head, {{"content", delta.content}}, nullptr, nullptr)
                           : chunk(head, delta.content, nullptr, nullptr);
  }
  return events;
}

std::string closing_events(const ReplyHead& head, const Generation& generation) {
  std::string events = chunk(head, head.is_chat ? Json::object() : Json(""), finish_reason_name(generation.finish_reason),
                             stop_reason_of(generation));
  if (head.include_usage) {
    Json data = envelope(head, "chat.completion.chunk");
    data["choices"] = Json::array();
    data["usage"] = usage_of(generation);
    data["x_seed"] = head.seed;
    events += event(data);
  }
  return events + "data: [DONE]\n\n";
}

std::string error_events(const ApiError& error) { return "data: " + error_body(error) + "\n\ndata: [DONE]\n\n"; }

std::string models_body(const std::vector<ModelCard>& models) {
  Json data = Json::array();
  for (const ModelCard& model : models) data.push_back(card(model));
  return dump_json(Json{{"object", "list"}, {"data", std::move(data)}});
}

std::string model_body(const ModelCard& model) { return dump_json(card(model)); }

}  // namespace espalier
