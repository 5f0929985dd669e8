#include "runtime/reply_stream.h"

#include <gtest/gtest.h>

#include "tests/unit/runtime/small_model.h"

namespace espalier {
namespace {

struct Shown {
  std::string reasoning;
  std::string content;
};

// Pushes ids until a stop string; checks on the way that no delta cuts a UTF-8 sequence.
Shown run(ReplyStream& stream, const std::vector<int32_t>& ids) {
  Shown shown;
  const auto take = [&](const ReplyDelta& delta) {
    for (const std::string* text : {&delta.reasoning, &delta.content}) {
      if (!text->empty()) {
        EXPECT_NE(static_cast<unsigned char>(text->front()) & 0xC0, 0x80) << "a delta starts inside a character";
      }
    }
    shown.reasoning += delta.reasoning;
    shown.content += delta.content;
  };
  for (const int32_t id : ids) {
    if (stream.stopped()) break;
    take(stream.push(id));
  }
  take(stream.finish());
  return shown;
}

std::vector<int32_t> join(std::initializer_list<std::vector<int32_t>> parts) {
  std::vector<int32_t> ids;
  for (const auto& part : parts) ids.insert(ids.end(), part.begin(), part.end());
  return ids;
}

std::vector<int32_t> marker(std::string_view token) { return {*golden_tokenizer()->id_of(token)}; }

TEST(ReplyStream, raw_replies_are_all_content_even_markers) {
  ReplyStream stream(*golden_tokenizer(), ReplyFormat::kRaw, false, {});
  const Shown shown = run(stream, join({byte_ids("\n\nhi"), marker("</think>"), byte_ids("x")}));
  EXPECT_EQ(shown.content, "\n\nhi</think>x");
  EXPECT_EQ(shown.reasoning, "");
  EXPECT_EQ(stream.n_reasoning(), 0);
}

TEST(ReplyStream, reasoning_ends_at_the_marker_and_loses_its_outer_newlines) {
  ReplyStream stream(*golden_tokenizer(), ReplyFormat::kChat, true, {});
  const Shown shown = run(stream, join({byte_ids("\nI think\n\nso\n\n"), marker("</think>"), byte_ids("\n\nYes.\n")}));
  EXPECT_EQ(shown.reasoning, "I think\n\nso");
  EXPECT_EQ(shown.content, "Yes.\n");
  EXPECT_EQ(stream.n_reasoning(), 15);
}

TEST(ReplyStream, a_marker_spelled_as_text_is_text) {
  ReplyStream stream(*golden_tokenizer(), ReplyFormat::kChat, true, {});
  const Shown shown = run(stream, join({byte_ids("say </think> here"), marker("</think>"), byte_ids("ok")}));
  EXPECT_EQ(shown.reasoning, "say </think> here");
  EXPECT_EQ(shown.content, "ok");
}

TEST(ReplyStream, reasoning_that_never_ends_is_all_kept) {
  ReplyStream stream(*golden_tokenizer(), ReplyFormat::kChat, true, {});
  const Shown shown = run(stream, byte_ids("endless\n\n"));
  EXPECT_EQ(shown.reasoning, "endless\n\n");
  EXPECT_EQ(shown.content, "");
}

TEST(ReplyStream, the_model_may_open_reasoning_itself_but_only_before_content) {
  ReplyStream opened(*golden_tokenizer(), ReplyFormat::kChat, false, {});
  const Shown first = run(opened, join({marker("<think>"), byte_ids("r"), marker("</think>"), byte_ids("c")}));
  EXPECT_EQ(first.reasoning, "r");
  EXPECT_EQ(first.content, "c");
  ReplyStream late(*golden_tokenizer(), ReplyFormat::kChat, false, {});
  const Shown second = run(late, join({byte_ids("c"), marker("<think>"), byte_ids("d"), marker("</think>"), byte_ids("e")}));
  EXPECT_EQ(second.reasoning, "");
  EXPECT_EQ(second.content, "cde");
}

TEST(ReplyStream, characters_are_released_whole_and_a_cut_one_becomes_a_replacement) {
  ReplyStream stream(*golden_tokenizer(), ReplyFormat::kChat, false, {});
  const std::string text = "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80z";
  EXPECT_EQ(run(stream, byte_ids(text)).content, text);
  ReplyStream cut(*golden_tokenizer(), ReplyFormat::kChat, false, {});
  EXPECT_EQ(run(cut, byte_ids("a\xF0\x9F\x98")).content, "a\xEF\xBF\xBD");
}

TEST(ReplyStream, a_character_cut_by_the_end_of_reasoning_does_not_leak_into_content) {
  ReplyStream stream(*golden_tokenizer(), ReplyFormat::kChat, true, {});
  const Shown shown = run(stream, join({byte_ids("a\xE2\x82"), marker("</think>"), byte_ids("\xAC" "b")}));
  EXPECT_EQ(shown.reasoning, "a\xEF\xBF\xBD");
  EXPECT_EQ(shown.content, "\xEF\xBF\xBD" "b");
}

TEST(ReplyStream, stop_strings_are_searched_in_content_only) {
  ReplyStream stream(*golden_tokenizer(), ReplyFormat::kChat, true, {"END"});
  const Shown shown = run(stream, join({byte_ids("the END of"), marker("</think>"), byte_ids("so END it")}));
  EXPECT_EQ(shown.reasoning, "the END of");
  EXPECT_EQ(shown.content, "so ");
  EXPECT_TRUE(stream.stopped());
  EXPECT_EQ(stream.stop_string(), "END");
}

TEST(ReplyStream, text_held_for_a_stop_string_is_released_at_the_end) {
  ReplyStream stream(*golden_tokenizer(), ReplyFormat::kRaw, false, {"END"});
  EXPECT_EQ(run(stream, byte_ids("so EN")).content, "so EN");
  EXPECT_FALSE(stream.stopped());
}

}  // namespace
}  // namespace espalier
