#include "text/chat_options.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "text/json_fields.h"
#include "text/python_json.h"

namespace espalier {
namespace {

constexpr size_t kMaxTools = 512;
constexpr size_t kMaxToolName = 256;

struct Effort {
  bool is_off = false;
  int value = 75;
};

Result<Effort> parse_effort(const Json& effort, const std::string& where) {
  const auto refuse = [&] {
    return invalid_argument(
        where + ": expected none, minimal, low, medium, high, xhigh, max, ultra or an integer from 1 to 100, found " +
        describe_json(effort));
  };
  if (effort.is_number_integer()) {
    if (effort < 1 || effort > 100) return refuse();
    return Effort{false, effort.get<int>()};
  }
  if (!effort.is_string()) return refuse();
  const std::string& name = effort.get_ref<const std::string&>();
  if (name == "none") return Effort{true, 75};
  if (name == "minimal" || name == "low") return Effort{false, 50};
  if (name == "medium" || name == "high" || name == "xhigh") return Effort{false, 75};
  if (name == "max" || name == "ultra") return Effort{false, 100};
  return refuse();
}

// An object member, or null; anything else is refused.
Result<const Json*> object_member(const Json& object, std::string_view key) {
  const Json* member = find_member(object, key);
  if (member != nullptr && !member->is_object()) {
    return invalid_argument(std::string(key) + ": expected an object, found " + describe_json(*member));
  }
  return member;
}

Result<std::optional<bool>> switch_of(const Json& object, std::string_view key, const std::string& where) {
  if (find_member(object, key) == nullptr) return std::optional<bool>();
  ASSIGN_OR_RETURN(const bool value, bool_member(object, key, false, where));
  return std::optional<bool>(value);
}

// {"type": "enabled" | "disabled" | "adaptive"}
Result<std::optional<bool>> thinking_type(const Json& body) {
  ASSIGN_OR_RETURN(const Json* thinking, object_member(body, "thinking"));
  if (thinking == nullptr || find_member(*thinking, "type") == nullptr) return std::optional<bool>();
  ASSIGN_OR_RETURN(const std::string type, string_member(*thinking, "type", "thinking"));
  if (type == "enabled" || type == "adaptive") return std::optional<bool>(true);
  if (type == "disabled") return std::optional<bool>(false);
  return invalid_argument("thinking.type: expected enabled, disabled or adaptive, found '" + type.substr(0, 60) + "'");
}

// The first effort given, in order of precedence.
Result<std::optional<Effort>> find_effort(const Json& body, const Json* kwargs) {
  const auto from = [](const Json& object, std::string_view key,
                       const std::string& where) -> Result<std::optional<Effort>> {
    const Json* effort = find_member(object, key);
    if (effort == nullptr) return std::optional<Effort>();
    ASSIGN_OR_RETURN(const Effort value, parse_effort(*effort, where));
    return std::optional<Effort>(value);
  };
  if (kwargs != nullptr) {
    ASSIGN_OR_RETURN(const auto effort, from(*kwargs, "reasoning_effort", "chat_template_kwargs.reasoning_effort"));
    if (effort) return effort;
  }
  ASSIGN_OR_RETURN(const auto top, from(body, "reasoning_effort", "reasoning_effort"));
  if (top) return top;
  for (const std::string_view key : {"reasoning", "output_config"}) {
    const Json* object = find_member(body, key);
    if (object == nullptr || !object->is_object()) continue;
    ASSIGN_OR_RETURN(const auto effort, from(*object, "effort", std::string(key) + ".effort"));
    if (effort) return effort;
  }
  return std::optional<Effort>();
}

Status parse_thinking(const Json& body, const Json* kwargs, ChatRequest& request) {
  ASSIGN_OR_RETURN(const auto effort, find_effort(body, kwargs));
  std::optional<bool> on;
  if (kwargs != nullptr) {
    ASSIGN_OR_RETURN(const auto thinking, switch_of(*kwargs, "thinking", "chat_template_kwargs"));
    ASSIGN_OR_RETURN(const auto enable, switch_of(*kwargs, "enable_thinking", "chat_template_kwargs"));
    if (thinking || enable) on = thinking.value_or(false) || enable.value_or(false);
  }
  ASSIGN_OR_RETURN(const auto type, thinking_type(body));
  ASSIGN_OR_RETURN(const auto top, switch_of(body, "enable_thinking", "chat"));
  if (!on) on = type ? type : top;
  request.thinking = on.value_or(true) && !(effort && effort->is_off);
  if (effort) request.effort = effort->value;
  return ok_status();
}

// A description in front of a function's own, and "namespace::name".
Status apply_namespace(const Json& space, const std::string& where, Json& function) {
  std::string name = space.is_string() ? space.get<std::string>() : "";
  std::string description;
  if (space.is_object()) {
    ASSIGN_OR_RETURN(name, string_member(space, "name", where));
    if (find_member(space, "description") != nullptr) {
      ASSIGN_OR_RETURN(description, string_member(space, "description", where));
    }
  } else if (!space.is_string()) {
    return invalid_argument(where + ": expected a string or an object with a name, found " + describe_json(space));
  }
  std::string own = function["name"].get<std::string>();
  if (const size_t colons = own.find("::"); colons != std::string::npos) {
    if (own.substr(0, colons) != name) {
      return invalid_argument(where + ": '" + name + "' does not agree with the name '" + own + "'");
    }
  } else {
    function["name"] = name + "::" + own;
  }
  if (!description.empty()) {
    const Json* text = find_member(function, "description");
    function["description"] =
        description + "\n" + (text != nullptr && text->is_string() ? text->get<std::string>() : "");
  }
  return ok_status();
}

Status check_tool_name(const std::string& name, const std::string& where) {
  const bool is_plain = std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '_' || c == '.' ||
           c == ':' || c == '-';
  });
  if (name.empty() || name.size() > kMaxToolName || !is_plain) {
    return invalid_argument(where + ".name: expected 1 to 256 characters of A-Z a-z 0-9 _ . : -, found '" +
                            name.substr(0, 60) + "'");
  }
  if (const size_t colons = name.find("::");
      colons != std::string::npos && name.find("::", colons + 2) != std::string::npos) {
    return invalid_argument(where + ".name: '" + name.substr(0, 60) + "' has more than one '::'");
  }
  return ok_status();
}

Result<std::string> parse_tool(const Json& tool, const std::string& where) {
  if (!tool.is_object()) return invalid_argument(where + ": expected an object, found " + describe_json(tool));
  const Json* inner = find_member(tool, "function");
  if (const Json* type = find_member(tool, "type"); inner != nullptr && type != nullptr && *type != "function") {
    return invalid_argument(where + ".type: expected \"function\", found " + describe_json(*type));
  }
  const std::string here = inner != nullptr ? where + ".function" : where;
  Json function = inner != nullptr ? *inner : tool;
  if (!function.is_object()) return invalid_argument(here + ": expected an object, found " + describe_json(function));
  ASSIGN_OR_RETURN(const std::string name, string_member(function, "name", here));
  RETURN_IF_ERROR(check_tool_name(name, here));
  const Json* space = find_member(function, "namespace");
  if (space == nullptr && inner != nullptr) space = find_member(tool, "namespace");
  if (space != nullptr) {
    const Json copy = *space;
    function.erase("namespace");
    RETURN_IF_ERROR(apply_namespace(copy, here + ".namespace", function));
  }
  return python_json(function);
}

}  // namespace

Status parse_chat_options(const Json& body, ChatRequest& request) {
  ASSIGN_OR_RETURN(const Json* kwargs, object_member(body, "chat_template_kwargs"));
  RETURN_IF_ERROR(parse_thinking(body, kwargs, request));
  if (kwargs != nullptr) {
    ASSIGN_OR_RETURN(request.drop_thinking, bool_member(*kwargs, "drop_thinking", true, "chat_template_kwargs"));
  }
  ASSIGN_OR_RETURN(const auto add_header, switch_of(body, "add_generation_prompt", "chat"));
  ASSIGN_OR_RETURN(request.continue_final_message, bool_member(body, "continue_final_message", false, "chat"));
  if (request.continue_final_message && add_header.value_or(false)) {
    return invalid_argument("continue_final_message: cannot be true together with add_generation_prompt");
  }
  request.add_generation_prompt = add_header.value_or(true) && !request.continue_final_message;
  return ok_status();
}

Result<std::vector<std::string>> parse_tools(const Json& tools, const std::string& where) {
  if (!tools.is_array() || tools.size() > kMaxTools) {
    return invalid_argument(where + ": expected an array of at most " + std::to_string(kMaxTools) + " tools, found " +
                            (tools.is_array() ? std::to_string(tools.size()) : describe_json(tools)));
  }
  std::vector<std::string> out;
  for (size_t i = 0; i < tools.size(); ++i) {
    ASSIGN_OR_RETURN(std::string schema, parse_tool(tools[i], where + "[" + std::to_string(i) + "]"));
    out.push_back(std::move(schema));
  }
  return out;
}

Result<std::optional<std::string>> parse_response_schema(const Json& body) {
  ASSIGN_OR_RETURN(const Json* format, object_member(body, "response_format"));
  if (format == nullptr) return std::optional<std::string>();
  ASSIGN_OR_RETURN(const std::string type, string_member(*format, "type", "response_format"));
  if (type == "text" || type == "json_object") return std::optional<std::string>();
  if (type != "json_schema") {
    return invalid_argument("response_format.type: expected text, json_object or json_schema, found '" +
                            type.substr(0, 60) + "'");
  }
  const Json* wrapper = find_member(*format, "json_schema");
  const Json* schema = wrapper != nullptr && wrapper->is_object() ? find_member(*wrapper, "schema") : nullptr;
  if (schema == nullptr || !schema->is_object()) {
    return invalid_argument("response_format.json_schema.schema: expected an object, found " +
                            (schema == nullptr ? std::string("nothing") : describe_json(*schema)));
  }
  return std::optional<std::string>(python_json(*schema));
}

}  // namespace espalier
