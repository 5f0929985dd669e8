// Messages to turns: what the encoding renders after merging user and tool messages and sorting tool results.
#pragma once

#include <string>
#include <vector>

#include "text/chat.h"

namespace espalier {

// A part of a user turn: own text or image, or a tool's result.
struct TurnBlock {
  bool is_tool_result = false;
  std::string tool_call_id;     // tool result
  std::vector<ChatPart> parts;  // one for own text and images
};

struct ChatTurn {
  const ChatMessage* message = nullptr;  // the first message of the turn
  std::vector<TurnBlock> blocks;         // user turns
  bool is_user() const { return message->role == ChatRole::kUser || message->role == ChatRole::kTool; }
};

// Consecutive user and tool messages become one turn; a turn with a task takes nothing more. The results in a turn
// stand in the order of the calls that they answer. `messages` must outlive the turns.
std::vector<ChatTurn> merge_turns(const std::vector<ChatMessage>& messages);

}  // namespace espalier
