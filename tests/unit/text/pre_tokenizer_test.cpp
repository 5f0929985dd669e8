#include "text/pre_tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "text/utf8.h"

namespace espalier {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> cut(const std::vector<SplitStep>& steps, const std::string& text) {
  const PreTokenizer pre_tokenizer = PreTokenizer::compile(steps).value();
  SplitPattern::Scratch scratch;
  std::vector<TextRange> pieces;
  EXPECT_TRUE(pre_tokenizer.split(text, scratch, pieces).ok());
  std::vector<std::string> out;
  for (const TextRange& piece : pieces) out.push_back(text.substr(piece.begin, piece.end - piece.begin));
  return out;
}

TEST(PreTokenizer, isolated_keeps_matches_and_gaps) {
  EXPECT_THAT(cut({{"-", true, SplitBehavior::kIsolated, false}}, "the-final--countdown"),
              ElementsAre("the", "-", "final", "-", "-", "countdown"));
}

TEST(PreTokenizer, removed_drops_matches_or_gaps_when_inverted) {
  EXPECT_THAT(cut({{"-", true, SplitBehavior::kRemoved, false}}, "-a--b"), ElementsAre("a", "b"));
  EXPECT_THAT(cut({{"-", true, SplitBehavior::kRemoved, true}}, "-a--b"), ElementsAre("-", "-", "-"));
}

TEST(PreTokenizer, contiguous_joins_adjacent_matches) {
  EXPECT_THAT(cut({{"-", true, SplitBehavior::kContiguous, false}}, "the-final--countdown"),
              ElementsAre("the", "-", "final", "--", "countdown"));
}

TEST(PreTokenizer, merged_with_a_neighbour_joins_one_match_only) {
  EXPECT_THAT(cut({{"-", true, SplitBehavior::kMergedWithPrevious, false}}, "the-final--countdown"),
              ElementsAre("the-", "final-", "-", "countdown"));
  EXPECT_THAT(cut({{"-", true, SplitBehavior::kMergedWithNext, false}}, "the-final--countdown"),
              ElementsAre("the", "-final", "-", "-countdown"));
}

TEST(PreTokenizer, a_step_sees_only_the_fragments_of_the_step_before) {
  // The look-ahead finds the end of its fragment, so the space is free to stand alone.
  const std::vector<SplitStep> steps = {{"\\p{N}{1,3}", false, SplitBehavior::kIsolated, false},
                                        {"\\s+(?!\\S)|\\s+", false, SplitBehavior::kIsolated, false}};
  EXPECT_THAT(cut(steps, "  1234 x"), ElementsAre("  ", "123", "4", " ", "x"));
}

TEST(PreTokenizer, no_steps_and_no_text_are_fine) {
  EXPECT_THAT(cut({}, "a b"), ElementsAre("a b"));
  EXPECT_THAT(cut({{"a", true, SplitBehavior::kIsolated, false}}, ""), ElementsAre());
}

TEST(SplitPattern, letters_that_came_after_the_engines_unicode_count_as_letters) {
  // U+1C89 (Unicode 16, Lu), U+A7DA (16, Lu), U+323AF (15, a Han letter), U+897 (16, a mark).
  for (const char* letter : {"\u1C89", "\uA7DA", "\U000323AF", "\u0897"}) {
    EXPECT_THAT(cut({{"[\\p{L}\\p{M}]+", false, SplitBehavior::kIsolated, false}}, std::string("a") + letter + "b!"),
                ElementsAre(std::string("a") + letter + "b", "!"));
  }
}

TEST(SplitPattern, the_mongolian_vowel_separator_is_no_space) {
  EXPECT_THAT(cut({{"\\s+", false, SplitBehavior::kIsolated, false}}, "a\u180Eb\u0085c"),
              ElementsAre("a\u180Eb", "\u0085", "c"));
}

TEST(SplitPattern, a_shadow_has_the_length_of_the_text_and_exists_only_when_needed) {
  EXPECT_EQ(shadow_of("plain ÄÖ 中文 😀"), "");
  const std::string text = "x\u1C89y\U000323AFz";
  const std::string shadow = shadow_of(text);
  EXPECT_EQ(shadow.size(), text.size());
  EXPECT_NE(shadow, text);
  EXPECT_TRUE(is_valid_utf8(shadow));
}

TEST(SplitPattern, syntax_that_the_engines_read_differently_is_refused_by_name) {
  const std::vector<std::pair<const char*, const char*>> cases = {{"\\w+", "the escape '\\w'"},
                                                                  {"\\h", "the escape '\\h'"},
                                                                  {"\\bx", "the escape '\\b'"},
                                                                  {"(a)\\1", "the escape '\\1'"},
                                                                  {"\\p{Han}+", "property 'Han'"},
                                                                  {"\\pL", "property without braces"},
                                                                  {"[a[bc]]", "class within a class"},
                                                                  {"[a-z&&[^b]]", "intersection"},
                                                                  {"^a", "anchor '^'"},
                                                                  {"a$", "anchor '$'"},
                                                                  {"(?m:a)", "group '(?m:'"},
                                                                  {"(*VERB)a", "a verb"},
                                                                  {"a{,3}", "no {n,m}"},
                                                                  {"a{2}+", "'{n,m}+'"},
                                                                  {"[]a]", "starts with ']'"},
                                                                  {"(?<name>a)", "group '(?<n'"}};
  for (const auto& [regex, message] : cases) {
    const auto result = SplitPattern::compile(regex);
    ASSERT_FALSE(result.ok()) << regex;
    EXPECT_EQ(result.error().code(), StatusCode::kUnimplemented) << regex;
    EXPECT_THAT(result.error().message(), HasSubstr(message)) << regex;
  }
  for (const char* broken : {"[abc", "a\\", "(a", "a)"}) {
    const auto result = SplitPattern::compile(broken);
    ASSERT_FALSE(result.ok()) << broken;
    EXPECT_EQ(result.error().code(), StatusCode::kDataLoss) << broken;
  }
}

TEST(SplitPattern, common_patterns_of_other_tokenizers_are_accepted) {
  for (const char* regex : {"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| "
                            "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
                            "[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+", "(?:a|b)++c", "\\d{2,}", "(?<=a)b", "\\P{^Lu}x"}) {
    EXPECT_TRUE(SplitPattern::compile(regex).ok()) << SplitPattern::compile(regex).error().message();
  }
}

TEST(SplitPattern, catastrophic_backtracking_ends_with_an_error) {
  const SplitPattern pattern = SplitPattern::compile("(?:a+)+[bc]").value();
  SplitPattern::Scratch scratch;
  std::vector<TextRange> out;
  const Status status = pattern.find_all(std::string(2000, 'a'), {0, 2000}, scratch, out);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("2000 bytes"));
}

}  // namespace
}  // namespace espalier
