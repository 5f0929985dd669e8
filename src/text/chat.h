// Conversations in the official V4.1 encoding: messages in, the exact prompt text and its token ids out.
//
// Parsing (JSON to ChatRequest) is apart from rendering (ChatRequest to prompt). Values of JSON (tool schemas,
// arguments) are kept as text, already serialised as the reference does. Text of users, tools and histories is never
// trusted: markers spelled in it stay ordinary text, unless `parse_special_in_content` asks for the reference's
// behaviour. Threads: pure. Source: serving.md section 1; decisions in docs/formats/chat.md.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "format/json.h"
#include "text/tokenizer.h"

namespace espalier {

enum class ChatRole { kSystem, kUser, kAssistant, kTool, kLatestReminder };

// A part of a message's content. An image is a placeholder in the prompt; its data stays with the caller.
struct ChatPart {
  bool is_image = false;
  std::string text;
};

struct ToolArgument {
  std::string name;
  bool is_string = true;
  std::string value;  // a string's characters, or the JSON of anything else
};

struct ToolCall {
  std::string id;
  std::string name;
  std::vector<ToolArgument> arguments;
};

struct ChatMessage {
  ChatRole role = ChatRole::kUser;
  std::vector<ChatPart> content;
  std::string reasoning;              // assistant
  std::vector<ToolCall> tool_calls;   // assistant
  std::string tool_call_id;           // tool
  std::optional<std::string> task;    // user: "action", "query", "authority", "domain", "title", "read_url"
  bool is_prefix = false;             // the last message, an assistant's: continue it
  std::vector<std::string> tools;     // system: schemas, one JSON document each
  std::optional<std::string> schema;  // system: the JSON schema that the reply must follow
};

struct ChatRequest {
  std::vector<ChatMessage> messages;
  bool thinking = true;
  int effort = 75;            // 1..100; rendered when thinking
  bool drop_thinking = true;  // forget the reasoning of earlier turns; never when tools are present
  bool add_generation_prompt = true;
  bool continue_final_message = false;
  bool parse_special_in_content = false;
};

struct RenderedPrompt {
  std::string text;
  std::vector<int32_t> ids;
  bool starts_in_reasoning = false;  // the reply begins inside a <think> block
  int n_images = 0;                  // placeholders in the prompt
};

// A chat-completions body, or its `messages` array alone, as text. Fields that do not shape the prompt are ignored.
// Errors: data_loss when the text is not JSON, else invalid_argument with the field's path ("messages[2].content: …").
Result<ChatRequest> parse_chat(std::string_view body);
// The same from a parsed body.
Result<ChatRequest> parse_chat_json(const Json& body);

// Errors: failed_precondition when the tokenizer lacks a marker that the conversation needs; invalid_argument for a
// conversation without messages.
Result<RenderedPrompt> render_chat(const Tokenizer& tokenizer, const ChatRequest& request);

}  // namespace espalier
