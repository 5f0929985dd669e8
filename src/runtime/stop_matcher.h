// Finds stop strings in text that arrives in pieces, holding back what could still become one.
//
// push() returns text that is safe to show. A match may start in one piece and end in another; after each piece the earliest
// start wins, then the longest string; the text is cut where the match starts. Source: docs/api.md, "Stop strings".
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace espalier {

class StopMatcher {
 public:
  // Empty strings are ignored (callers refuse them).
  explicit StopMatcher(std::vector<std::string> stops);

  // Text that no stop string can reach any more; empty after a match.
  std::string push(std::string_view text);
  // What is still held back, at the end of a reply without a match.
  std::string finish();

  bool matched() const { return matched_; }
  // The string that matched; empty before.
  const std::string& match() const { return match_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
  std::string match_;
  bool matched_ = false;
};

}  // namespace espalier
