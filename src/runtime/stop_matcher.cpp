#include "runtime/stop_matcher.h"

#include <algorithm>
#include <utility>

namespace espalier {

StopMatcher::StopMatcher(std::vector<std::string> stops) : stops_(std::move(stops)) {
  std::erase_if(stops_, [](const std::string& s) { return s.empty(); });
}

std::string StopMatcher::push(std::string_view text) {
  if (matched_) return {};
  if (stops_.empty()) return std::string(text);
  held_ += text;

  size_t start = std::string::npos;
  for (const std::string& stop : stops_) {
    const size_t at = held_.find(stop);
    if (at == std::string::npos) continue;
    if (start == std::string::npos || at < start || (at == start && stop.size() > match_.size())) {
      start = at;
      match_ = stop;
    }
  }
  if (start != std::string::npos) {
    matched_ = true;
    std::string shown = held_.substr(0, start);
    held_.clear();
    return shown;
  }

  size_t keep = 0;  // length of the longest tail that a stop string starts with
  for (const std::string& stop : stops_) {
    for (size_t n = std::min(stop.size() - 1, held_.size()); n > keep; --n) {
      if (held_.compare(held_.size() - n, n, stop, 0, n) == 0) {
        keep = n;
        break;
      }
    }
  }
  std::string shown = held_.substr(0, held_.size() - keep);
  held_.erase(0, held_.size() - keep);
  return shown;
}

std::string StopMatcher::finish() { return std::exchange(held_, {}); }

}  // namespace espalier
