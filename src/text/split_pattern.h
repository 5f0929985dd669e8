// One regular expression that cuts text into pieces, with Oniguruma's meaning (the engine of the reference) on PCRE2.
//
// Only syntax that means the same to both engines is accepted: general categories, \s \d, classes without nesting,
// quantifiers, alternatives, look-around. The rest (\w, \h, anchors, scripts, "&&", back references) is refused by
// name. Unicode tables are bridged by giving the engine a shadow of the text (shadow_of). Threads: immutable after
// compile; every thread brings its own Scratch.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace espalier {

struct TextRange {
  size_t begin;
  size_t end;
};

class SplitPattern {
 public:
  // Errors: unimplemented (syntax outside the common subset), data_loss (not a regular expression, or one that matches
  // the empty string), with the position.
  static Result<SplitPattern> compile(const std::string& regex);
  // A pattern that matches `text` literally; not empty.
  static Result<SplitPattern> compile_literal(const std::string& text);

  ~SplitPattern();
  SplitPattern(SplitPattern&&) noexcept;
  SplitPattern& operator=(SplitPattern&&) noexcept;

  class Scratch {
   public:
    Scratch();
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

   private:
    friend class SplitPattern;
    struct Data;
    std::unique_ptr<Data> data_;
  };

  // Appends the matches inside text[range], in order; the pattern sees nothing outside the range. `text` is valid
  // UTF-8. Errors: resource_exhausted when the pattern backtracks too much.
  Status find_all(std::string_view text, TextRange range, Scratch& scratch, std::vector<TextRange>& out) const;

 private:
  struct Code;
  explicit SplitPattern(std::unique_ptr<Code> code);
  static Result<SplitPattern> compile_checked(const std::string& regex, bool literal);
  std::unique_ptr<Code> code_;
};

// `text` with every code point whose class PCRE2 may see otherwise replaced by one of the same length that it sees as
// the reference does; empty when nothing needs replacing. Match in the shadow, cut in the text.
std::string shadow_of(std::string_view text);

// Refuses syntax that the two engines read differently. Exposed for tests.
Status check_split_syntax(std::string_view regex);

}  // namespace espalier
