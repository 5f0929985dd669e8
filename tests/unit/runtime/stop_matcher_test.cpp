#include "runtime/stop_matcher.h"

#include <gtest/gtest.h>

#include "base/rng.h"

namespace espalier {
namespace {

TEST(StopMatcher, without_stops_text_passes_at_once) {
  StopMatcher matcher({});
  EXPECT_EQ(matcher.push("abc"), "abc");
  EXPECT_EQ(matcher.finish(), "");
}

TEST(StopMatcher, a_match_may_start_in_one_piece_and_end_in_another) {
  StopMatcher matcher({"STOP"});
  EXPECT_EQ(matcher.push("go S"), "go ");
  EXPECT_EQ(matcher.push("TO"), "");
  EXPECT_FALSE(matcher.matched());
  EXPECT_EQ(matcher.push("P and on"), "");
  EXPECT_TRUE(matcher.matched());
  EXPECT_EQ(matcher.match(), "STOP");
  EXPECT_EQ(matcher.push("more"), "");
  EXPECT_EQ(matcher.finish(), "");
}

TEST(StopMatcher, a_false_start_is_released_with_the_next_piece) {
  StopMatcher matcher({"STOP"});
  EXPECT_EQ(matcher.push("ST"), "");
  EXPECT_EQ(matcher.push("ART"), "START");
  EXPECT_EQ(matcher.push("S"), "");
  EXPECT_EQ(matcher.finish(), "S");
}

TEST(StopMatcher, a_restart_inside_a_false_start_is_found) {
  StopMatcher matcher({"aab"});
  std::string shown;
  for (const char* piece : {"a", "a", "a", "b"}) shown += matcher.push(piece);
  EXPECT_TRUE(matcher.matched());
  EXPECT_EQ(shown, "a");
}

TEST(StopMatcher, the_earliest_start_wins_then_the_longest) {
  StopMatcher earliest({"cd", "bcde"});
  EXPECT_EQ(earliest.push("abcdef"), "a");
  EXPECT_EQ(earliest.match(), "bcde");
  StopMatcher longest({"b", "bc", "bcx"});
  EXPECT_EQ(longest.push("abcd"), "a");
  EXPECT_EQ(longest.match(), "bc");
}

TEST(StopMatcher, one_stop_gives_the_same_text_for_every_cut) {
  const CounterRng rng(7, "stop matcher");
  uint64_t at = 0;
  int n_matched = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string text;
    std::string stop;
    for (uint64_t i = 0; i < 12; ++i) text += static_cast<char>('a' + rng.bits(at++) % 2);
    for (uint64_t i = 0, n = 1 + rng.bits(at++) % 5; i < n; ++i) stop += static_cast<char>('a' + rng.bits(at++) % 2);
    StopMatcher matcher({stop});
    std::string shown;
    for (size_t i = 0; i < text.size();) {
      const size_t n = 1 + rng.bits(at++) % 4;
      shown += matcher.push(text.substr(i, n));
      EXPECT_TRUE(text.compare(0, shown.size(), shown) == 0);
      i += n;
    }
    shown += matcher.finish();
    EXPECT_EQ(shown, text.substr(0, text.find(stop))) << text << " / " << stop;
    EXPECT_EQ(matcher.matched(), text.find(stop) != std::string::npos);
    n_matched += matcher.matched() ? 1 : 0;
  }
  EXPECT_GT(n_matched, 500);
  EXPECT_LT(n_matched, 2900);
}

}  // namespace
}  // namespace espalier
