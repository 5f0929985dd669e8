// The compressed token map of the Engram hash: token id -> class of tokens that read alike ("The", " the", "THE").
//
// Key of a token: its decoded text after NFKC, NFD, removal of combining marks, lower case, runs of space, tab, CR, LF
// to one space, and strip; the text itself when nothing is left; the token's spelling in the vocabulary when the text
// holds U+FFFD. Classes are numbered by first appearance. The Unicode rules are those of PyPI `tokenizers` (combining
// marks: general category M of Unicode 9), since the released tables were trained with them. Source: model.md
// section 7.1.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"

namespace espalier {

struct EngramMap {
  std::vector<int32_t> class_of;  // [n_tokens]
  int32_t n_classes = 0;
};

// Errors: internal when the Unicode library fails. Cost: about 0.2 s for 129,280 tokens.
Result<EngramMap> build_engram_map(const Tokenizer& tokenizer);

// The normalised form of valid UTF-8 (before the rule for empty results).
Result<std::string> normalize_for_engram(std::string_view text);

}  // namespace espalier
