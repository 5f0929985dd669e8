#include "runtime/reply_stream.h"

#include <utility>

namespace espalier {

std::string_view finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop: return "stop";
    case FinishReason::kLength: return "length";
    case FinishReason::kCancelled: return "cancelled";
  }
  return "stop";
}

ReplyStream::ReplyStream(const Tokenizer& tokenizer, ReplyFormat format, bool starts_in_reasoning,
                         std::vector<std::string> stop)
    : tokenizer_(tokenizer),
      decoder_(tokenizer),
      stops_(std::move(stop)),
      format_(format),
      in_reasoning_(format == ReplyFormat::kChat && starts_in_reasoning),
      think_open_(tokenizer.id_of("<think>")),
      think_close_(tokenizer.id_of("</think>")) {}

ReplyDelta ReplyStream::push(int32_t id) {
  if (in_reasoning_) ++n_reasoning_;
  if (format_ == ReplyFormat::kRaw || (id != think_open_ && id != think_close_)) {
    return take_text(decoder_.push(id), false);
  }
  // A marker ends whatever was being decoded before it.
  ReplyDelta delta = take_text(decoder_.finish(), in_reasoning_ && id == think_close_);
  decoder_ = StreamDecoder(tokenizer_);
  if (id == think_close_) {
    in_reasoning_ = false;
  } else if (!content_started_) {
    in_reasoning_ = true;  // the model opens reasoning itself; later openings are swallowed
  }
  return delta;
}

ReplyDelta ReplyStream::finish() {
  if (stopped()) return {};
  ReplyDelta delta = take_text(decoder_.finish(), false);
  delta.reasoning += std::exchange(held_newlines_, {});
  delta.content += stops_.finish();
  return delta;
}

ReplyDelta ReplyStream::take_text(std::string text, bool at_reasoning_end) {
  ReplyDelta delta;
  if (in_reasoning_) {
    if (!reasoning_started_) {
      text.erase(0, text.find_first_not_of('\n'));
      reasoning_started_ = !text.empty();
    }
    held_newlines_ += text;
    const size_t last = held_newlines_.find_last_not_of('\n');
    const size_t n_safe = last == std::string::npos ? 0 : last + 1;
    delta.reasoning = held_newlines_.substr(0, n_safe);
    held_newlines_.erase(0, n_safe);
    if (at_reasoning_end) held_newlines_.clear();
    return delta;
  }
  if (format_ == ReplyFormat::kChat && !content_started_) text.erase(0, text.find_first_not_of('\n'));
  content_started_ = content_started_ || !text.empty();
  delta.content = stops_.push(text);
  return delta;
}

}  // namespace espalier
