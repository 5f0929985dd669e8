#include "text/chat_turns.h"

#include <algorithm>
#include <unordered_map>

namespace espalier {
namespace {

void append_blocks(const ChatMessage& message, std::vector<TurnBlock>& blocks) {
  if (message.role == ChatRole::kTool) {
    blocks.push_back({true, message.tool_call_id, message.content});
    return;
  }
  for (const ChatPart& part : message.content) blocks.push_back({false, "", {part}});
}

// Only the results move, among the places that results have; unknown ids count as the first call.
void sort_results(const std::unordered_map<std::string, size_t>& order, std::vector<TurnBlock>& blocks) {
  std::vector<TurnBlock> results;
  for (const TurnBlock& block : blocks) {
    if (block.is_tool_result) results.push_back(block);
  }
  if (results.size() < 2) return;
  const auto index = [&](const TurnBlock& block) {
    const auto it = order.find(block.tool_call_id);
    return it == order.end() ? size_t{0} : it->second;
  };
  std::stable_sort(results.begin(), results.end(),
                   [&](const TurnBlock& a, const TurnBlock& b) { return index(a) < index(b); });
  size_t next = 0;
  for (TurnBlock& block : blocks) {
    if (block.is_tool_result) block = results[next++];
  }
}

}  // namespace

std::vector<ChatTurn> merge_turns(const std::vector<ChatMessage>& messages) {
  std::vector<ChatTurn> turns;
  for (const ChatMessage& message : messages) {
    const bool from_user = message.role == ChatRole::kUser || message.role == ChatRole::kTool;
    const bool can_join =
        !turns.empty() && turns.back().is_user() && (message.role == ChatRole::kTool || !turns.back().message->task);
    if (!from_user || !can_join) turns.push_back({&message, {}});
    if (from_user) append_blocks(message, turns.back().blocks);
  }
  std::unordered_map<std::string, size_t> order;
  for (ChatTurn& turn : turns) {
    if (turn.message->role == ChatRole::kAssistant && !turn.message->tool_calls.empty()) {
      order.clear();
      for (size_t i = 0; i < turn.message->tool_calls.size(); ++i) order[turn.message->tool_calls[i].id] = i;
    } else if (turn.is_user() && !order.empty()) {
      sort_results(order, turn.blocks);
    }
  }
  return turns;
}

}  // namespace espalier
