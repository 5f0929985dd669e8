// Tokens of a reply to text while they arrive: only whole UTF-8 sequences are released, at most three bytes are held
// back.
//
// The pieces joined equal Tokenizer::decode of all ids, wherever they are cut.
#pragma once

#include <cstdint>
#include <string>

#include "text/tokenizer.h"

namespace espalier {

class StreamDecoder {
 public:
  // The tokenizer must outlive the decoder. `skip_special`: special tokens decode to nothing.
  explicit StreamDecoder(const Tokenizer& tokenizer, bool skip_special = false)
      : tokenizer_(&tokenizer), skip_special_(skip_special) {}

  // The text that is certain after this token; often empty in the middle of a character.
  std::string push(int32_t id);
  // The end: a cut sequence becomes U+FFFD. The decoder is then empty and can be used again.
  std::string finish();

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_;
  std::string held_;
};

}  // namespace espalier
