// Cuts text into the pieces that merges never cross: every step's pattern runs on each fragment of the step before.
#pragma once

#include <string_view>
#include <vector>

#include "base/status.h"
#include "text/split_pattern.h"
#include "text/tokenizer_file.h"

namespace espalier {

class PreTokenizer {
 public:
  // Errors: as SplitPattern::compile, with the step's number.
  static Result<PreTokenizer> compile(const std::vector<SplitStep>& steps);

  // Appends the pieces of `text` (valid UTF-8), in order, none empty. Pieces that a step removes are left out.
  // Errors: as SplitPattern::find_all.
  Status split(std::string_view text, SplitPattern::Scratch& scratch, std::vector<TextRange>& out) const;

 private:
  struct Step {
    SplitPattern pattern;
    SplitBehavior behavior;
    bool is_inverted;
  };
  std::vector<Step> steps_;
};

}  // namespace espalier
