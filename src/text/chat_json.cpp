// Chat-completions bodies to ChatRequest: messages, contents and tool calls. Switches and tools: chat_options.cpp.
#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "text/chat.h"
#include "text/chat_options.h"
#include "text/json_fields.h"
#include "text/python_json.h"

namespace espalier {
namespace {

constexpr std::array<std::string_view, 6> kTasks = {"action", "query", "authority", "domain", "title", "read_url"};

// Absent or null gives "".
Result<std::string> optional_string(const Json& object, std::string_view key, const std::string& where) {
  if (find_member(object, key) == nullptr) return std::string();
  return string_member(object, key, where);
}

Result<ChatPart> parse_part(const Json& part, const std::string& where) {
  if (!part.is_object())
    return invalid_argument(where + ": expected an object with a type, found " + describe_json(part));
  ASSIGN_OR_RETURN(const std::string type, string_member(part, "type", where));
  ChatPart out;
  if (type == "text" || type == "input_text" || type == "output_text") {
    ASSIGN_OR_RETURN(out.text, string_member(part, "text", where));
  } else if (type == "image" || type == "image_url" || type == "input_image") {
    out.is_image = true;
  } else {
    return invalid_argument(where + ".type: expected text, image or image_url, found '" + type.substr(0, 60) + "'");
  }
  return out;
}

Result<std::vector<ChatPart>> parse_content(const Json& message, const std::string& where) {
  std::vector<ChatPart> out;
  const Json* content = find_member(message, "content");
  if (content == nullptr) {
    out.push_back({});
  } else if (content->is_string()) {
    out.push_back({false, content->get<std::string>()});
  } else if (content->is_array()) {
    for (size_t i = 0; i < content->size(); ++i) {
      ASSIGN_OR_RETURN(ChatPart part, parse_part((*content)[i], where + ".content[" + std::to_string(i) + "]"));
      out.push_back(std::move(part));
    }
  } else {
    return invalid_argument(where + ".content: expected a string or an array of parts, found " +
                            describe_json(*content));
  }
  return out;
}

// A JSON text that decodes to a string is decoded once more; anything that is no object becomes one raw parameter.
std::vector<ToolArgument> parse_arguments(const Json& arguments) {
  Json value = arguments;
  for (int i = 0; i < 2 && value.is_string(); ++i) {
    auto decoded = parse_json(value.get_ref<const std::string&>(), "arguments");
    if (!decoded.ok()) break;
    value = std::move(decoded).value();
  }
  std::vector<ToolArgument> out;
  if (!value.is_object()) {
    const bool is_string = arguments.is_string();
    out.push_back({"arguments", is_string, is_string ? arguments.get<std::string>() : python_json(arguments)});
    return out;
  }
  for (const auto& [name, member] : value.items()) {
    out.push_back({name, member.is_string(), member.is_string() ? member.get<std::string>() : python_json(member)});
  }
  return out;
}

Result<ToolCall> parse_function_call(const Json& function, const std::string& where) {
  if (!function.is_object()) return invalid_argument(where + ": expected an object, found " + describe_json(function));
  ToolCall call;
  ASSIGN_OR_RETURN(call.name, string_member(function, "name", where));
  static const Json kNoArguments = Json::object();
  const Json* arguments = find_member(function, "arguments");
  call.arguments = parse_arguments(arguments == nullptr || *arguments == "" ? kNoArguments : *arguments);
  return call;
}

Status parse_calls(const Json& message, const std::string& where, ChatMessage& out) {
  if (const Json* calls = find_member(message, "tool_calls")) {
    if (!calls->is_array())
      return invalid_argument(where + ".tool_calls: expected an array, found " + describe_json(*calls));
    for (size_t i = 0; i < calls->size(); ++i) {
      const std::string here = where + ".tool_calls[" + std::to_string(i) + "]";
      const Json& entry = (*calls)[i];
      if (!entry.is_object()) return invalid_argument(here + ": expected an object, found " + describe_json(entry));
      const Json* function = find_member(entry, "function");
      if (function == nullptr) return invalid_argument(here + ".function: expected an object, found nothing");
      ASSIGN_OR_RETURN(ToolCall call, parse_function_call(*function, here + ".function"));
      ASSIGN_OR_RETURN(call.id, optional_string(entry, "id", here));
      out.tool_calls.push_back(std::move(call));
    }
  } else if (const Json* legacy = find_member(message, "function_call")) {
    ASSIGN_OR_RETURN(ToolCall call, parse_function_call(*legacy, where + ".function_call"));
    out.tool_calls.push_back(std::move(call));
  }
  return ok_status();
}

Status parse_reasoning(const Json& message, const std::string& where, ChatMessage& out) {
  for (const std::string_view key : {"reasoning_content", "reasoning"}) {
    if (find_member(message, key) == nullptr) continue;
    ASSIGN_OR_RETURN(out.reasoning, string_member(message, key, where));
    return ok_status();
  }
  const Json* details = find_member(message, "reasoning_details");
  if (details == nullptr) return ok_status();
  if (!details->is_array())
    return invalid_argument(where + ".reasoning_details: expected an array, found " + describe_json(*details));
  for (const Json& detail : *details) {
    if (!detail.is_object())
      return invalid_argument(where + ".reasoning_details: expected objects, found " + describe_json(detail));
    ASSIGN_OR_RETURN(const std::string text, optional_string(detail, "text", where + ".reasoning_details"));
    out.reasoning += text;
  }
  return ok_status();
}

Result<ChatRole> parse_role(const Json& message, const std::string& where) {
  ASSIGN_OR_RETURN(const std::string role, string_member(message, "role", where));
  if (role == "system" || role == "developer") return ChatRole::kSystem;  // the encoding has no developer turn
  if (role == "user") return ChatRole::kUser;
  if (role == "assistant") return ChatRole::kAssistant;
  if (role == "tool" || role == "function") return ChatRole::kTool;
  if (role == "latest_reminder") return ChatRole::kLatestReminder;
  return invalid_argument(where +
                          ".role: expected system, developer, user, assistant, tool or latest_reminder, found '" +
                          role.substr(0, 60) + "'");
}

Result<ChatMessage> parse_message(const Json& message, const std::string& where) {
  if (!message.is_object()) return invalid_argument(where + ": expected an object, found " + describe_json(message));
  ChatMessage out;
  ASSIGN_OR_RETURN(out.role, parse_role(message, where));
  ASSIGN_OR_RETURN(out.content, parse_content(message, where));
  switch (out.role) {
    case ChatRole::kAssistant: {
      RETURN_IF_ERROR(parse_reasoning(message, where, out));
      RETURN_IF_ERROR(parse_calls(message, where, out));
      ASSIGN_OR_RETURN(out.is_prefix, bool_member(message, "prefix", false, where));
      break;
    }
    case ChatRole::kTool: {
      ASSIGN_OR_RETURN(out.tool_call_id, optional_string(message, "tool_call_id", where));
      break;
    }
    case ChatRole::kUser: {
      if (find_member(message, "content") == nullptr) {
        return invalid_argument(where + ".content: is missing; a user message needs a string or an array of parts");
      }
      if (find_member(message, "task") == nullptr) break;
      ASSIGN_OR_RETURN(out.task, string_member(message, "task", where));
      if (std::find(kTasks.begin(), kTasks.end(), *out.task) == kTasks.end()) {
        return invalid_argument(where + ".task: '" + out.task->substr(0, 60) +
                                "' is none of action, query, authority, domain, title, read_url");
      }
      break;
    }
    case ChatRole::kSystem: {
      if (const Json* tools = find_member(message, "tools")) {
        ASSIGN_OR_RETURN(out.tools, parse_tools(*tools, where + ".tools"));
      }
      break;
    }
    case ChatRole::kLatestReminder:
      break;
  }
  return out;
}

// Where request-level tools and schemas go: a system message at the start, an empty one when there is none.
ChatMessage& leading_system(std::vector<ChatMessage>& messages) {
  if (messages.front().role == ChatRole::kSystem) return messages.front();
  ChatMessage system;
  system.role = ChatRole::kSystem;
  return *messages.insert(messages.begin(), system);
}

Result<ChatRequest> parse(const Json& body) {
  if (!body.is_object() && !body.is_array()) {
    return invalid_argument("chat: expected an object with messages, or an array of messages, found " +
                            describe_json(body));
  }
  const Json* messages = body.is_array() ? &body : find_member(body, "messages");
  if (messages == nullptr || !messages->is_array()) {
    return invalid_argument("messages: expected an array, found " +
                            (messages == nullptr ? std::string("nothing") : describe_json(*messages)));
  }
  if (messages->empty()) return invalid_argument("messages: expected at least one message, found none");
  ChatRequest request;
  for (size_t i = 0; i < messages->size(); ++i) {
    ASSIGN_OR_RETURN(ChatMessage message, parse_message((*messages)[i], "messages[" + std::to_string(i) + "]"));
    if (message.is_prefix && i + 1 < messages->size()) {
      return invalid_argument("messages[" + std::to_string(i) + "].prefix: only the last message can be continued");
    }
    request.messages.push_back(std::move(message));
  }
  if (body.is_array()) return request;
  RETURN_IF_ERROR(parse_chat_options(body, request));
  if (request.continue_final_message && request.messages.back().role != ChatRole::kAssistant) {
    return invalid_argument("continue_final_message: expected the last message to be an assistant's");
  }
  std::vector<std::string> tools;
  for (const std::string_view key : {"tools", "functions"}) {
    const Json* list = find_member(body, key);
    if (list == nullptr) continue;
    ASSIGN_OR_RETURN(const auto parsed, parse_tools(*list, std::string(key)));
    tools.insert(tools.end(), parsed.begin(), parsed.end());
  }
  ASSIGN_OR_RETURN(auto schema, parse_response_schema(body));
  if (!tools.empty()) {
    auto& own = leading_system(request.messages).tools;
    own.insert(own.end(), tools.begin(), tools.end());
  }
  if (schema) leading_system(request.messages).schema = std::move(schema);
  return request;
}

}  // namespace

Result<ChatRequest> parse_chat_json(const Json& body) {
  auto request = parse(body);
  if (!request.ok()) return invalid_argument(request.error().message());
  return request;
}

Result<ChatRequest> parse_chat(std::string_view body) {
  ASSIGN_OR_RETURN(const Json json, parse_json(body, "chat"));
  return parse_chat_json(json);
}

}  // namespace espalier
