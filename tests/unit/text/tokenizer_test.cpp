#include "text/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <thread>

#include "format/json.h"
#include "text/utf8.h"
#include "unit/text/test_tokenizer.h"

namespace espalier {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::parse_tokenizer;
using testing::small_tokenizer;
using testing::small_tokenizer_json;

std::vector<std::string> spellings(const Tokenizer& tokenizer, std::string_view text) {
  std::vector<std::string> out;
  const auto ids = tokenizer.encode(text).value();
  for (const int32_t id : ids) out.emplace_back(tokenizer.token_bytes(id));
  return out;
}

TEST(Tokenizer, agrees_with_the_recorded_vectors_of_the_golden_checkpoint_in_both_directions) {
  const std::string golden = ESPALIER_SOURCE_DIR "/tests/golden/model/";
  const Tokenizer tokenizer = Tokenizer::open(golden + "tiny-a").value();
  const Json vectors = read_json_file(golden + "tiny-a-ref/tokenizer_vectors.json").value();
  ASSERT_GT(vectors["strings"].size(), 10u);
  for (const Json& entry : vectors["strings"]) {
    const auto want = entry["ids"].get<std::vector<int32_t>>();
    EXPECT_EQ(tokenizer.encode(entry["text"].get<std::string>()).value(), want) << entry["text"];
    EXPECT_EQ(tokenizer.decode(want), entry["decoded"].get<std::string>());
  }
  ASSERT_TRUE(vectors["decode_single"].is_array());
  ASSERT_EQ(vectors["decode_single"].size(), static_cast<size_t>(tokenizer.n_tokens()));
  for (int32_t id = 0; id < tokenizer.n_tokens(); ++id) {
    EXPECT_EQ(tokenizer.decode({&id, 1}), vectors["decode_single"][static_cast<size_t>(id)].get<std::string>()) << id;
  }
}

TEST(Tokenizer, encodes_the_empty_text_as_no_ids) {
  const Tokenizer tokenizer = small_tokenizer();
  EXPECT_TRUE(tokenizer.encode("").value().empty());
  EXPECT_EQ(tokenizer.decode({}), "");
}

TEST(Tokenizer, merges_by_rank_and_not_from_left_to_right) {
  // "abc": the pair (a, b) has the lower rank, so "c" stays alone; alone, "bc" merges.
  EXPECT_THAT(spellings(small_tokenizer(), "abc"), ElementsAre("ab", "c"));
  EXPECT_THAT(spellings(small_tokenizer(), "xbc"), ElementsAre("x", "bc"));
  EXPECT_THAT(spellings(small_tokenizer(), "hello the thing"), ElementsAre("hello", " the", " t", "h", "ing"));
}

TEST(Tokenizer, cuts_pieces_as_the_released_pre_tokenizer_does) {
  const Tokenizer tokenizer = small_tokenizer();
  EXPECT_THAT(spellings(tokenizer, "    1"), ElementsAre("    ", "1"));  // a run of spaces before a digit stays whole
  EXPECT_THAT(spellings(tokenizer, "    a"),
              ElementsAre("  ", " ", " ", "a"));  // before a word it gives up its last space
  EXPECT_THAT(spellings(tokenizer, "a\n\nb"), ElementsAre("a", "\n\n", "b"));
}

// The definition: join the pair of lowest rank, leftmost first, until none is left. Quadratic and simple.
std::vector<std::string> merge_naively(const Json& json, std::string_view piece) {
  std::vector<std::string> parts;
  for (const char c : piece) parts.push_back(token_of_bytes(std::string(1, c)));
  for (const Json& merge : json["model"]["merges"]) {
    const std::string pair = merge.get<std::string>();
    const size_t space = pair.find(' ');
    const std::string left = pair.substr(0, space), right = pair.substr(space + 1);
    for (size_t i = 0; i + 1 < parts.size(); ++i) {
      if (parts[i] == left && parts[i + 1] == right) {
        parts[i] += right;
        parts.erase(parts.begin() + static_cast<ptrdiff_t>(i) + 1);
      }
    }
  }
  return parts;
}

TEST(Tokenizer, short_and_long_pieces_merge_as_the_naive_definition) {
  const Json json = small_tokenizer_json();
  const Tokenizer tokenizer = parse_tokenizer(json);
  testing::Random rng(5);
  for (int round = 0; round < 400; ++round) {
    std::string text;
    const size_t size = 1 + rng.next() % 120;  // both sides of the switch to the heap
    while (text.size() < size) text += "aaabcheling"[rng.next() % 11];
    std::vector<std::string> got;
    const auto ids = tokenizer.encode(text).value();
    for (const int32_t id : ids) got.emplace_back(tokenizer.id_to_token(id));
    ASSERT_EQ(got, merge_naively(json, text)) << text;
  }
}

TEST(Tokenizer, runs_of_a_million_characters_take_less_than_a_quadratic_time) {
  const Tokenizer tokenizer = small_tokenizer();
  for (const std::string unit : {"a", " ", "\n", "你", "!", "7", "é", "\t ", "hello "}) {
    std::string text;
    while (text.size() < 1000000) text += unit;
    const auto ids = tokenizer.encode(text).value();  // a quadratic merge needs hours
    EXPECT_EQ(tokenizer.decode(ids), text) << unit;
  }
}

TEST(Tokenizer, every_byte_is_decoded_by_its_own_token) {
  const Tokenizer tokenizer = small_tokenizer();
  for (int32_t b = 0; b < 256; ++b) EXPECT_EQ(tokenizer.token_bytes(b), std::string(1, static_cast<char>(b)));
}

TEST(Tokenizer, decoding_gives_back_any_valid_text) {
  const Tokenizer tokenizer = small_tokenizer();
  testing::Random rng(17);
  for (int round = 0; round < 300; ++round) {
    std::string text;
    for (int i = 0; i < 40; ++i) {
      uint32_t c = static_cast<uint32_t>(rng.next() % 0x110000);
      if (rng.next() % 2 == 0) c %= 0x300;
      if (c >= 0xD800 && c < 0xE000) c = 0x20;
      append_utf8(c, text);
    }
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text).value()), text);
  }
}

TEST(Tokenizer, bytes_that_are_not_utf8_are_read_as_replacement_characters) {
  const Tokenizer tokenizer = small_tokenizer();
  EXPECT_EQ(tokenizer.encode("a\xFFz").value(), tokenizer.encode("a\uFFFDz").value());
  EXPECT_EQ(tokenizer.encode("\xE4\xBD").value(), tokenizer.encode("\uFFFD").value());  // one for a cut sequence
  EXPECT_EQ(tokenizer.encode("\xED\xA0\x80").value(), tokenizer.encode("\uFFFD\uFFFD\uFFFD").value());  // a surrogate
}

TEST(Tokenizer, finds_added_tokens_leftmost_and_longest_before_anything_else) {
  Json json = small_tokenizer_json();
  const int32_t next = static_cast<int32_t>(256 + json["model"]["merges"].size() + json["added_tokens"].size());
  for (const char* content : {"<x", "<x>", "x>y"}) {
    json["added_tokens"].push_back({{"id", next + static_cast<int32_t>(json["added_tokens"].size()) - 12},
                                    {"content", content},
                                    {"special", false},
                                    {"normalized", true}});
  }
  const Tokenizer tokenizer = parse_tokenizer(json);
  EXPECT_THAT(spellings(tokenizer, "a<x>y"), ElementsAre("a", "<x>", "y"));
  EXPECT_THAT(spellings(tokenizer, "<xx>y"), ElementsAre("<x", "x>y"));
}

TEST(Tokenizer, tokens_matched_on_raw_text_go_before_those_matched_on_normalised_text) {
  Json json = small_tokenizer_json();
  const int32_t next = static_cast<int32_t>(256 + json["model"]["merges"].size() + json["added_tokens"].size());
  json["added_tokens"].push_back({{"id", next}, {"content", "abX"}, {"special", false}, {"normalized", true}});
  json["added_tokens"].push_back({{"id", next + 1}, {"content", "Xcd"}, {"special", true}, {"normalized", false}});
  EXPECT_THAT(spellings(parse_tokenizer(json), "abXcd"), ElementsAre("ab", "Xcd"));
}

TEST(Tokenizer, markers_are_ordinary_text_when_asked) {
  const Tokenizer tokenizer = small_tokenizer();
  const int32_t think = tokenizer.id_of("<think>").value();
  EXPECT_THAT(tokenizer.encode("<think>").value(), ElementsAre(think));
  const auto plain = tokenizer.encode("<think>", {.special_tokens_in_text = false}).value();
  EXPECT_EQ(std::count(plain.begin(), plain.end(), think), 0);
  EXPECT_EQ(tokenizer.decode(plain), "<think>");
}

TEST(Tokenizer, spans_merge_across_their_borders_but_markers_need_trust_throughout) {
  const Tokenizer tokenizer = small_tokenizer();
  const auto ids = [&](std::vector<PromptSpan> spans) { return tokenizer.encode_spans(spans).value(); };
  EXPECT_EQ(ids({{"he", false}, {"llo", true}}), tokenizer.encode("hello").value());
  EXPECT_EQ(ids({{"<thi", true}, {"nk>", true}}), tokenizer.encode("<think>").value());
  EXPECT_EQ(ids({{"<thi", true}, {"nk>", false}}),
            tokenizer.encode("<think>", {.special_tokens_in_text = false}).value());
  EXPECT_EQ(ids({{"<thi", true}, {"", false}, {"nk>", true}}), tokenizer.encode("<think>").value());
  EXPECT_TRUE(ids({}).empty());
}

TEST(Tokenizer, special_tokens_can_be_left_out_of_the_text) {
  const Tokenizer tokenizer = small_tokenizer();
  const auto ids = tokenizer.encode("<｜begin▁of▁sentence｜>a<think>").value();
  EXPECT_EQ(tokenizer.decode(ids), "<｜begin▁of▁sentence｜>a<think>");
  EXPECT_EQ(tokenizer.decode(ids, true), "a<think>");  // only tokens flagged special go
}

TEST(Tokenizer, ids_that_are_no_token_decode_to_nothing_and_check_ids_names_the_first) {
  const Tokenizer tokenizer = small_tokenizer();
  const std::vector<int32_t> ids = {97, -1, 1000000};
  EXPECT_EQ(tokenizer.decode(ids), "a");
  const Status status = tokenizer.check_ids(ids);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("found -1 at position 1"));
  EXPECT_TRUE(tokenizer.check_ids(std::vector<int32_t>{0, tokenizer.n_tokens() - 1}).ok());
  EXPECT_FALSE(tokenizer.id_of("no such token").has_value());
}

TEST(Tokenizer, ignore_merges_takes_a_piece_that_is_a_token_as_it_is) {
  Json json = small_tokenizer_json();
  json["model"]["merges"].erase(json["model"]["merges"].size() - 1);  // nothing builds "bc" any more
  EXPECT_THAT(spellings(parse_tokenizer(json), "bc"), ElementsAre("b", "c"));
  json["model"]["ignore_merges"] = true;
  EXPECT_THAT(spellings(parse_tokenizer(json), "bc"), ElementsAre("bc"));
}

TEST(Tokenizer, the_post_processors_template_is_added_only_when_asked) {
  Json json = small_tokenizer_json();
  json["post_processor"] = {{"type", "TemplateProcessing"},
                            {"single", Json::array({{{"SpecialToken", {{"id", "BOS"}, {"type_id", 0}}}},
                                                    {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}})},
                            {"pair", Json::array()},
                            {"special_tokens", {{"BOS", {{"id", "BOS"}, {"ids", {3}}, {"tokens", {"BOS"}}}}}}};
  const Tokenizer tokenizer = parse_tokenizer(json);
  EXPECT_THAT(tokenizer.encode("a").value(), ElementsAre(97));
  EXPECT_THAT(tokenizer.encode("a", {.add_template = true}).value(), ElementsAre(3, 97));
}

TEST(Tokenizer, gives_the_same_ids_from_many_threads) {
  const Tokenizer tokenizer = small_tokenizer();
  const std::string text = "the hello  123 你好 <think> aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\n\n";
  const auto want = tokenizer.encode(text).value();
  std::vector<std::thread> threads;
  std::vector<int> differences(4, 0);
  for (size_t t = 0; t < differences.size(); ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 50; ++i) differences[t] += tokenizer.encode(text).value() != want;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_THAT(differences, ElementsAre(0, 0, 0, 0));
}

}  // namespace
}  // namespace espalier
