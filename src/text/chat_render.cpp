// Turns to prompt: the literals and their order are the official encoding's (serving.md 1.4 to 1.7).
#include <utility>

#include "text/chat.h"
#include "text/chat_turns.h"

namespace espalier {
namespace {

constexpr std::string_view kBegin = "<｜begin▁of▁sentence｜>";
constexpr std::string_view kEnd = "<｜end▁of▁sentence｜>";
constexpr std::string_view kSystem = "<｜System｜>";
constexpr std::string_view kUser = "<｜User｜>";
constexpr std::string_view kAssistant = "<｜Assistant｜>";
constexpr std::string_view kLatestReminder = "<｜latest_reminder｜>";
constexpr std::string_view kThinkOpen = "<think>";
constexpr std::string_view kThinkClose = "</think>";
constexpr std::string_view kDsml = "｜DSML｜";
constexpr std::string_view kImage = "<｜deepseek_image｜>";

// %D stands for the DSML token.
constexpr std::string_view kToolsBefore =
    R"(## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<%D calls>" block like the following:

<%D calls>
<%D invoke name="$TOOL_NAME">
<%D parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</%D parameter>
...
</%D invoke>
<%D invoke name="$TOOL_NAME2">
...
</%D invoke>
</%D calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

)";
constexpr std::string_view kToolsAfter =
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n";
constexpr std::string_view kSchemaBefore =
    "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n";

class Renderer {
 public:
  Renderer(const Tokenizer& tokenizer, const ChatRequest& request)
      : tokenizer_(tokenizer),
        request_(request),
        turns_(merge_turns(request.messages)),
        drops_reasoning_(request.drop_thinking) {
    for (const ChatMessage& message : request.messages) {
      if (!message.tools.empty()) drops_reasoning_ = false;
    }
    for (size_t i = 0; i < turns_.size(); ++i) {
      if (counts_as_user(i)) last_user_ = static_cast<ptrdiff_t>(i);
    }
  }

  Result<RenderedPrompt> run() {
    marker(kBegin);
    for (size_t i = 0; i < turns_.size(); ++i) {
      if (i == 0) open_conversation();
      body(i);
      transition(i);
    }
    if (!missing_.empty()) {
      return failed_precondition("render: the tokenizer has no token '" + missing_ +
                                 "', which this conversation needs; use a DeepSeek V4.1 tokenizer.json");
    }
    RenderedPrompt out;
    std::vector<PromptSpan> spans;
    for (const auto& [text, trusted] : parts_) {
      spans.push_back({text, trusted});
      out.text += text;
    }
    ASSIGN_OR_RETURN(out.ids, tokenizer_.encode_spans(spans));
    out.starts_in_reasoning = in_reasoning_;
    out.n_images = n_images_;
    return out;
  }

 private:
  // A token of the encoding.
  void marker(std::string_view token) {
    if (missing_.empty() && !tokenizer_.id_of(token)) missing_ = token;
    literal(token);
  }
  // Text of the encoding.
  void literal(std::string_view text) { parts_.emplace_back(text, true); }
  // Text from outside.
  void foreign(std::string_view text) { parts_.emplace_back(text, request_.parse_special_in_content); }

  void dsml_literal(std::string_view text) {
    for (size_t at = 0;;) {
      const size_t mark = text.find("%D", at);
      literal(text.substr(at, mark - at));
      if (mark == std::string_view::npos) return;
      marker(kDsml);
      at = mark + 2;
    }
  }

  void content(const std::vector<ChatPart>& parts) {
    for (size_t i = 0; i < parts.size(); ++i) {
      if (i > 0) literal("\n\n");
      if (parts[i].is_image) {
        marker(kImage);
        ++n_images_;
      } else {
        foreign(parts[i].text);
      }
    }
  }

  bool counts_as_user(size_t i) const {
    return turns_[i].is_user() || (turns_[i].message->role == ChatRole::kSystem && i > 0);
  }

  void open_conversation() {
    if (request_.thinking || turns_[0].message->role == ChatRole::kSystem) marker(kSystem);
    if (request_.thinking) {
      literal("Reasoning Effort: " + std::to_string(request_.effort) +
              " (range 1-100, the higher the value, the more thorough the reasoning)\n\n");
    }
  }

  void body(size_t i) {
    const ChatTurn& turn = turns_[i];
    const ChatMessage& message = *turn.message;
    switch (message.role) {
      case ChatRole::kSystem:
        system(message, i);
        break;
      case ChatRole::kUser:
      case ChatRole::kTool:
        user(turn);
        break;
      case ChatRole::kLatestReminder:
        marker(kLatestReminder);
        content(message.content);
        break;
      case ChatRole::kAssistant:
        assistant(message, i);
        break;
    }
  }

  void system(const ChatMessage& message, size_t i) {
    if (i > 0) marker(kSystem);
    content(message.content);
    if (!message.tools.empty()) {
      literal("\n\n");
      dsml_literal(kToolsBefore);
      for (size_t t = 0; t < message.tools.size(); ++t) {
        if (t > 0) literal("\n");
        foreign(message.tools[t]);
      }
      literal(kToolsAfter);
    }
    if (message.schema) {
      literal("\n\n");
      literal(kSchemaBefore);
      foreign(*message.schema);
    }
  }

  void user(const ChatTurn& turn) {
    marker(kUser);
    for (size_t b = 0; b < turn.blocks.size(); ++b) {
      if (b > 0) literal("\n\n");
      if (turn.blocks[b].is_tool_result) literal("<tool_result>");
      content(turn.blocks[b].parts);
      if (turn.blocks[b].is_tool_result) literal("</tool_result>");
    }
  }

  bool is_continued(size_t i) const {
    return i + 1 == turns_.size() && turns_[i].message->role == ChatRole::kAssistant &&
           (turns_[i].message->is_prefix || request_.continue_final_message);
  }

  void assistant(const ChatMessage& message, size_t i) {
    const bool has_content = !message.content.empty() && (message.content.size() > 1 || message.content[0].is_image ||
                                                          !message.content[0].text.empty());
    const bool after_task = i > 0 && turns_[i - 1].message->task.has_value();
    const bool continues_reasoning = is_continued(i) && request_.thinking && !message.reasoning.empty() &&
                                     !has_content && message.tool_calls.empty();
    in_reasoning_ = false;
    if (request_.thinking && !after_task && (!drops_reasoning_ || static_cast<ptrdiff_t>(i) > last_user_)) {
      foreign(message.reasoning);
      in_reasoning_ = continues_reasoning;
      if (!continues_reasoning) marker(kThinkClose);
    }
    content(message.content);
    if (!message.tool_calls.empty()) calls(message.tool_calls);
    if (!is_continued(i)) marker(kEnd);
  }

  void calls(const std::vector<ToolCall>& tool_calls) {
    dsml_literal("\n\n<%D calls>\n");
    for (const ToolCall& call : tool_calls) {
      dsml_literal("<%D invoke name=\"");
      foreign(call.name);
      literal("\">\n");
      for (size_t a = 0; a < call.arguments.size(); ++a) {
        if (a > 0) literal("\n");
        dsml_literal("<%D parameter name=\"");
        foreign(call.arguments[a].name);
        literal(call.arguments[a].is_string ? "\" string=\"true\">" : "\" string=\"false\">");
        foreign(call.arguments[a].value);
        dsml_literal("</%D parameter>");
      }
      dsml_literal("\n</%D invoke>\n");
    }
    dsml_literal("</%D calls>");
  }

  void assistant_header(bool thinks) {
    marker(kAssistant);
    marker(thinks ? kThinkOpen : kThinkClose);
    in_reasoning_ = thinks;
  }

  // What follows a turn when the assistant speaks next.
  void transition(size_t i) {
    const bool is_last = i + 1 == turns_.size();
    if (!is_last) {
      const ChatRole next = turns_[i + 1].message->role;
      if (next != ChatRole::kAssistant && next != ChatRole::kLatestReminder) return;
    } else if (!request_.add_generation_prompt || is_continued(i)) {
      return;
    }
    const ChatMessage& message = *turns_[i].message;
    if (message.task) {
      if (*message.task == "action") assistant_header(request_.thinking);
      marker("<｜" + *message.task + "｜>");
      in_reasoning_ = false;
    } else if (counts_as_user(i)) {
      assistant_header(request_.thinking && (!drops_reasoning_ || static_cast<ptrdiff_t>(i) >= last_user_));
    } else if (is_last) {
      assistant_header(request_.thinking);  // a lone system message, a reminder or a closed reply: speak anyway
    }
  }

  const Tokenizer& tokenizer_;
  const ChatRequest& request_;
  std::vector<ChatTurn> turns_;
  bool drops_reasoning_;
  ptrdiff_t last_user_ = -1;
  std::vector<std::pair<std::string, bool>> parts_;  // text, trusted
  std::string missing_;
  bool in_reasoning_ = false;
  int n_images_ = 0;
};

}  // namespace

Result<RenderedPrompt> render_chat(const Tokenizer& tokenizer, const ChatRequest& request) {
  if (request.messages.empty()) return invalid_argument("messages: expected at least one message, found none");
  return Renderer(tokenizer, request).run();
}

}  // namespace espalier
