#include "text/stream_decoder.h"

#include <utility>

#include "text/utf8.h"

namespace espalier {

std::string StreamDecoder::push(int32_t id) {
  if (skip_special_ && tokenizer_->is_special(id)) return "";
  held_ += tokenizer_->token_bytes(id);
  size_t certain = held_.size();
  // Only the last three bytes can begin a sequence that later bytes complete.
  for (size_t at = held_.size() > 3 ? held_.size() - 3 : 0; at < held_.size(); ++at) {
    const Utf8Unit unit = next_utf8(held_, at);
    if (unit.cut_off) {
      certain = at;
      break;
    }
  }
  std::string out = to_valid_utf8(std::string_view(held_).substr(0, certain));
  held_.erase(0, certain);
  return out;
}

std::string StreamDecoder::finish() {
  return to_valid_utf8(std::exchange(held_, {}));
}

}  // namespace espalier
