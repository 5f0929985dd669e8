// Finds added tokens ("<think>") in text: leftmost first, the longest among those that start at the same byte.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace espalier {

struct AddedTokenMatch {
  size_t begin;
  size_t end;
  int32_t id;
};

class AddedTokenMatcher {
 public:
  AddedTokenMatcher() = default;
  // contents: not empty, no two equal.
  explicit AddedTokenMatcher(const std::vector<std::pair<std::string_view, int32_t>>& tokens);

  // Appends the matches inside text[begin, end), which do not overlap, in order. Cost: O(length · longest token).
  void find(std::string_view text, size_t begin, size_t end, std::vector<AddedTokenMatch>& out) const;

 private:
  struct Node {
    std::vector<std::pair<uint8_t, uint32_t>> children;  // byte, node; sorted by byte
    int32_t id = -1;
  };
  uint32_t child(uint32_t node, uint8_t byte) const;  // 0: none (the root is nobody's child)

  std::vector<Node> nodes_{Node{}};
  std::array<bool, 256> starts_{};
};

}  // namespace espalier
