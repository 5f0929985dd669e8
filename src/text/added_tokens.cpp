#include "text/added_tokens.h"

#include <algorithm>

namespace espalier {

AddedTokenMatcher::AddedTokenMatcher(const std::vector<std::pair<std::string_view, int32_t>>& tokens) {
  for (const auto& [content, id] : tokens) {
    starts_[static_cast<uint8_t>(content[0])] = true;
    uint32_t node = 0;
    for (const char c : content) {
      const uint8_t byte = static_cast<uint8_t>(c);
      uint32_t next = child(node, byte);
      if (next == 0) {
        next = static_cast<uint32_t>(nodes_.size());
        nodes_.emplace_back();
        auto& children = nodes_[node].children;
        children.insert(std::lower_bound(children.begin(), children.end(), std::pair<uint8_t, uint32_t>(byte, 0)),
                        {byte, next});
      }
      node = next;
    }
    nodes_[node].id = id;
  }
}

uint32_t AddedTokenMatcher::child(uint32_t node, uint8_t byte) const {
  const auto& children = nodes_[node].children;
  const auto it = std::lower_bound(children.begin(), children.end(), std::pair<uint8_t, uint32_t>(byte, 0));
  return it != children.end() && it->first == byte ? it->second : 0;
}

void AddedTokenMatcher::find(std::string_view text, size_t begin, size_t end, std::vector<AddedTokenMatch>& out) const {
  for (size_t at = begin; at < end;) {
    if (!starts_[static_cast<uint8_t>(text[at])]) {
      ++at;
      continue;
    }
    AddedTokenMatch best{at, at, -1};
    uint32_t node = 0;
    for (size_t i = at; i < end; ++i) {
      node = child(node, static_cast<uint8_t>(text[i]));
      if (node == 0) break;
      if (nodes_[node].id >= 0) best = {at, i + 1, nodes_[node].id};
    }
    if (best.id < 0) {
      ++at;
    } else {
      out.push_back(best);
      at = best.end;
    }
  }
}

}  // namespace espalier
