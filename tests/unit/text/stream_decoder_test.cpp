#include "text/stream_decoder.h"

#include <gtest/gtest.h>

#include "text/utf8.h"
#include "unit/text/test_tokenizer.h"

namespace espalier {
namespace {

using testing::small_tokenizer;

std::vector<int32_t> byte_ids(std::string_view bytes) {
  std::vector<int32_t> out;
  for (const char c : bytes) out.push_back(static_cast<uint8_t>(c));
  return out;
}

TEST(StreamDecoder, holds_a_character_back_until_its_last_byte) {
  const Tokenizer tokenizer = small_tokenizer();
  StreamDecoder decoder(tokenizer);
  EXPECT_EQ(decoder.push(0xF0), "");
  EXPECT_EQ(decoder.push(0x9F), "");
  EXPECT_EQ(decoder.push(0x98), "");
  EXPECT_EQ(decoder.push(0x80), "😀");
  EXPECT_EQ(decoder.push('a'), "a");
  EXPECT_EQ(decoder.finish(), "");
}

TEST(StreamDecoder, a_sequence_that_cannot_be_completed_is_replaced_at_once) {
  const Tokenizer tokenizer = small_tokenizer();
  StreamDecoder decoder(tokenizer);
  EXPECT_EQ(decoder.push(0xE4), "");
  EXPECT_EQ(decoder.push('x'), "\uFFFDx");
  EXPECT_EQ(decoder.push(0x80), "\uFFFD");
}

TEST(StreamDecoder, the_end_turns_a_cut_sequence_into_one_replacement_character) {
  const Tokenizer tokenizer = small_tokenizer();
  StreamDecoder decoder(tokenizer);
  EXPECT_EQ(decoder.push(0xE4), "");
  EXPECT_EQ(decoder.push(0xBD), "");
  EXPECT_EQ(decoder.finish(), "\uFFFD");
  EXPECT_EQ(decoder.push('b'), "b");  // usable again
}

TEST(StreamDecoder, pieces_joined_equal_the_whole_for_random_bytes) {
  const Tokenizer tokenizer = small_tokenizer();
  testing::Random rng(3);
  const std::string pool = "a\xC3\xA9\xE4\xBD\xA0\xF0\x9F\x98\x80\xFF\xED\xA0\x80\xC0";
  for (int round = 0; round < 2000; ++round) {
    std::string bytes;
    for (size_t i = rng.next() % 12; i > 0; --i) bytes += pool[rng.next() % pool.size()];
    const auto ids = byte_ids(bytes);
    StreamDecoder decoder(tokenizer);
    std::string joined;
    for (const int32_t id : ids) {
      const std::string piece = decoder.push(id);
      EXPECT_TRUE(is_valid_utf8(piece));
      joined += piece;
    }
    joined += decoder.finish();
    ASSERT_EQ(joined, tokenizer.decode(ids));
  }
}

TEST(StreamDecoder, special_tokens_are_left_out_when_asked) {
  const Tokenizer tokenizer = small_tokenizer();
  const int32_t end = tokenizer.id_of("<｜end▁of▁sentence｜>").value();
  EXPECT_EQ(StreamDecoder(tokenizer, true).push(end), "");
  EXPECT_EQ(StreamDecoder(tokenizer).push(end), "<｜end▁of▁sentence｜>");
}

TEST(Utf8, replaces_each_maximal_ill_formed_part_once) {
  // The examples of the Unicode standard, section 3.9, table 3-8 to 3-11.
  EXPECT_EQ(to_valid_utf8("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41"),
            "\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\x41");
  EXPECT_EQ(to_valid_utf8("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41"),
            "\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\x41");
  EXPECT_EQ(to_valid_utf8("\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42"),
            "\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\x41\uFFFD\uFFFD\x42");
  EXPECT_EQ(to_valid_utf8("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41"), "\uFFFD\uFFFD\uFFFD\uFFFD\x41");
}

TEST(Utf8, every_code_point_reads_back_as_written) {
  for (uint32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    std::string text;
    append_utf8(c, text);
    const Utf8Unit unit = next_utf8(text, 0);
    ASSERT_TRUE(unit.valid && unit.code_point == c && unit.size == text.size()) << c;
  }
}

}  // namespace
}  // namespace espalier
