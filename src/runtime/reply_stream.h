// Turns the ids of a reply into text, piece by piece: whole UTF-8 sequences, reasoning apart from content, stop strings.
//
// Markers are recognised by token id, never by spelling. Joined deltas do not depend on how the text was cut into tokens.
// Source: docs/api.md, "Reasoning" and "Stop strings".
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/generation.h"
#include "runtime/stop_matcher.h"
#include "text/stream_decoder.h"
#include "text/tokenizer.h"

namespace espalier {

class ReplyStream {
 public:
  // The tokenizer must outlive the stream.
  ReplyStream(const Tokenizer& tokenizer, ReplyFormat format, bool starts_in_reasoning, std::vector<std::string> stop);

  // Takes the next token (never the end token); returns the text that may be shown now.
  ReplyDelta push(int32_t id);
  // The end of the reply: text held back; a cut UTF-8 sequence becomes U+FFFD. Empty after a stop string.
  ReplyDelta finish();

  bool stopped() const { return stops_.matched(); }
  const std::string& stop_string() const { return stops_.match(); }
  // Tokens pushed while reasoning, its end marker included.
  int64_t n_reasoning() const { return n_reasoning_; }

 private:
  ReplyDelta take_text(std::string text, bool at_reasoning_end);

  const Tokenizer& tokenizer_;
  StreamDecoder decoder_;
  StopMatcher stops_;
  ReplyFormat format_;
  bool in_reasoning_;
  std::optional<int32_t> think_open_;
  std::optional<int32_t> think_close_;
  std::string held_newlines_;  // newlines of reasoning that may turn out to be its last
  bool reasoning_started_ = false;
  bool content_started_ = false;
  int64_t n_reasoning_ = 0;
};

}  // namespace espalier
