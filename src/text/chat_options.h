// The parts of a chat-completions body beside its messages that shape the prompt: thinking, effort, tools, reply
// schema.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "format/json.h"
#include "text/chat.h"

namespace espalier {

// Fills the switches of `request` from the fields of `body` (an object). Precedence: docs/formats/chat.md.
// Errors: invalid_argument or data_loss with the field's path.
Status parse_chat_options(const Json& body, ChatRequest& request);

// An array of {"type": "function", "function": {…}} (or of bare functions) to schemas as they stand in a prompt.
Result<std::vector<std::string>> parse_tools(const Json& tools, const std::string& where);

// response_format.json_schema.schema, or nothing for text and json_object.
Result<std::optional<std::string>> parse_response_schema(const Json& body);

}  // namespace espalier
