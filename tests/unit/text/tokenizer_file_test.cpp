#include "text/tokenizer_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>

#include "unit/text/test_tokenizer.h"

namespace espalier {
namespace {

using ::testing::HasSubstr;
using testing::small_tokenizer_json;

struct BadFile {
  const char* name;
  std::function<void(Json&)> change;
  StatusCode code;
  const char* message;
};

void PrintTo(const BadFile& bad, std::ostream* out) {
  *out << bad.name;
}

class TokenizerFileRefuses : public ::testing::TestWithParam<BadFile> {};

TEST_P(TokenizerFileRefuses, with_the_place_and_what_was_found) {
  Json json = small_tokenizer_json();
  GetParam().change(json);
  const auto result = Tokenizer::parse(dump_json(json), "t.json");
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.error().code(), GetParam().code) << result.error().message();
  EXPECT_THAT(result.error().message(), HasSubstr(GetParam().message));
  EXPECT_THAT(result.error().message(), HasSubstr("t.json"));
}

constexpr StatusCode kBad = StatusCode::kDataLoss;
constexpr StatusCode kUnread = StatusCode::kUnimplemented;

Json& first_split(Json& j) {
  return j["pre_tokenizer"]["pretokenizers"][0];
}

INSTANTIATE_TEST_SUITE_P(
    Every, TokenizerFileRefuses,
    ::testing::Values(
        BadFile{"not_an_object", [](Json& j) { j = Json::array(); }, kBad, "expected an object, found an array"},
        BadFile{"unknown_root_key", [](Json& j) { j["extra"] = 1; }, kUnread, "the key 'extra' is not known"},
        BadFile{"truncation",
                [](Json& j) {
                  j["truncation"] = {{"max_length", 3}};
                },
                kUnread, ".truncation"},
        BadFile{"no_model", [](Json& j) { j.erase("model"); }, kBad, ".model: expected an object"},
        BadFile{"other_model", [](Json& j) { j["model"]["type"] = "Unigram"; }, kUnread, "found \"Unigram\""},
        BadFile{"byte_fallback", [](Json& j) { j["model"]["byte_fallback"] = true; }, kUnread, "byte_fallback"},
        BadFile{"dropout", [](Json& j) { j["model"]["dropout"] = 0.1; }, kUnread, "dropout"},
        BadFile{"word_suffix", [](Json& j) { j["model"]["end_of_word_suffix"] = "</w>"; }, kUnread,
                "end_of_word_suffix"},
        BadFile{"vocab_is_a_list", [](Json& j) { j["model"]["vocab"] = Json::array(); }, kBad, "vocab"},
        BadFile{"id_is_a_string", [](Json& j) { j["model"]["vocab"]["!"] = "0"; }, kBad, "expected an id"},
        BadFile{"id_is_negative", [](Json& j) { j["model"]["vocab"]["!"] = -1; }, kBad, "expected an id"},
        BadFile{"id_is_huge", [](Json& j) { j["model"]["vocab"]["!"] = 4000000000u; }, kBad, "expected an id"},
        BadFile{"duplicate_id", [](Json& j) { j["model"]["vocab"]["!"] = 35; }, kBad, "the id 35 already belongs to"},
        BadFile{"gap_in_ids", [](Json& j) { j["added_tokens"].back()["id"] = 9999; }, kBad, "without a gap"},
        BadFile{"no_token_for_a_byte", [](Json& j) { j["model"]["vocab"].erase("!"); }, kBad,
                "no token for the byte 33"},
        BadFile{"merges_missing", [](Json& j) { j["model"].erase("merges"); }, kBad, "merges"},
        BadFile{"merge_of_three", [](Json& j) { j["model"]["merges"][0] = "a b c"; }, kBad, "merges[0]"},
        BadFile{"merge_is_a_number", [](Json& j) { j["model"]["merges"][1] = 5; }, kBad, "merges[1]"},
        BadFile{"merge_into_nothing", [](Json& j) { j["model"]["merges"][0] = "q z"; }, kBad,
                "'qz' is not in the vocabulary"},
        BadFile{"merge_twice", [](Json& j) { j["model"]["merges"][1] = j["model"]["merges"][0]; }, kBad,
                "appears twice"},
        BadFile{"added_is_an_object", [](Json& j) { j["added_tokens"] = Json::object(); }, kBad, "added_tokens"},
        BadFile{"added_empty", [](Json& j) { j["added_tokens"][0]["content"] = ""; }, kBad, "added_tokens[0].content"},
        BadFile{"added_too_long", [](Json& j) { j["added_tokens"][0]["content"] = std::string(600, 'x'); }, kBad,
                "found 600"},
        BadFile{"added_twice", [](Json& j) { j["added_tokens"][1]["content"] = j["added_tokens"][0]["content"]; }, kBad,
                "appears twice"},
        BadFile{"added_without_id", [](Json& j) { j["added_tokens"][1].erase("id"); }, kBad, "added_tokens[1].id"},
        BadFile{"added_id_of_another", [](Json& j) { j["added_tokens"][1]["id"] = 3; }, kBad,
                "the id 3 already belongs to"},
        BadFile{"added_contradicts_vocab", [](Json& j) { j["added_tokens"][1]["content"] = "!"; }, kBad,
                "has the id 33"},
        BadFile{"lstrip", [](Json& j) { j["added_tokens"][0]["lstrip"] = true; }, kUnread, "added_tokens[0].lstrip"},
        BadFile{"single_word", [](Json& j) { j["added_tokens"][0]["single_word"] = true; }, kUnread, "single_word"},
        BadFile{"normalizer", [](Json& j) { j["normalizer"] = {{"type", "NFC"}}; }, kUnread, "found 'NFC'"},
        BadFile{"normalizer_in_sequence", [](Json& j) { j["normalizer"]["normalizers"].push_back({{"type", "NFKC"}}); },
                kUnread, "NFKC"},
        BadFile{"no_pre_tokenizer", [](Json& j) { j["pre_tokenizer"] = nullptr; }, kUnread,
                "expected a ByteLevel step"},
        BadFile{"no_byte_level", [](Json& j) { j["pre_tokenizer"]["pretokenizers"].erase(3); }, kUnread,
                "expected a ByteLevel"},
        BadFile{"step_after_byte_level", [](Json& j) { j["pre_tokenizer"]["pretokenizers"].push_back(first_split(j)); },
                kUnread, "must be the last step"},
        BadFile{"other_step", [](Json& j) { first_split(j)["type"] = "Metaspace"; }, kUnread, "found 'Metaspace'"},
        BadFile{"prefix_space", [](Json& j) { j["pre_tokenizer"]["pretokenizers"][3]["add_prefix_space"] = true; },
                kUnread, "add_prefix_space"},
        BadFile{"unknown_behavior", [](Json& j) { first_split(j)["behavior"] = "Kept"; }, kBad, "'Kept' is none of"},
        BadFile{"pattern_missing", [](Json& j) { first_split(j).erase("pattern"); }, kBad, ".pattern"},
        BadFile{"pattern_broken", [](Json& j) { first_split(j)["pattern"] = {{"Regex", "(a"}}; }, kBad,
                "split pattern"},
        BadFile{"pattern_matches_nothing", [](Json& j) { first_split(j)["pattern"] = {{"Regex", "a*"}}; }, kBad,
                "empty string"},
        BadFile{"other_post_processor", [](Json& j) { j["post_processor"] = {{"type", "BertProcessing"}}; }, kUnread,
                "BertProcessing"},
        BadFile{"no_decoder", [](Json& j) { j["decoder"] = nullptr; }, kUnread, ".decoder"},
        BadFile{"other_decoder", [](Json& j) { j["decoder"] = {{"type", "WordPiece"}}; }, kUnread, "WordPiece"}),
    [](const auto& param) { return std::string(param.param.name); });

TEST(TokenizerFile, broken_json_names_the_source_and_the_byte) {
  const auto result = Tokenizer::parse("{\"model\": ", "t.json");
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.error().code(), StatusCode::kDataLoss);
  EXPECT_THAT(result.error().message(), HasSubstr("t.json: not valid JSON at byte"));
}

TEST(TokenizerFile, a_key_given_twice_is_refused) {
  std::string text = dump_json(small_tokenizer_json());
  text.insert(text.find("\"!\":"), "\"!\":999,");
  const auto result = Tokenizer::parse(text, "t.json");
  ASSERT_FALSE(result.ok());
  EXPECT_THAT(result.error().message(), HasSubstr("key '!' appears twice"));
}

TEST(TokenizerFile, a_missing_file_is_not_found_and_named) {
  const auto result = Tokenizer::open("/no/such/folder");
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.error().code(), StatusCode::kNotFound);
  EXPECT_THAT(result.error().message(), HasSubstr("/no/such/folder"));
}

TEST(TokenizerFile, merges_may_be_pairs_as_newer_files_write_them) {
  Json json = small_tokenizer_json();
  const Tokenizer strings = testing::parse_tokenizer(json);
  for (Json& merge : json["model"]["merges"]) {
    const std::string pair = merge.get<std::string>();
    const size_t space = pair.find(' ');
    merge = Json::array({pair.substr(0, space), pair.substr(space + 1)});
  }
  const Tokenizer pairs = testing::parse_tokenizer(json);
  EXPECT_EQ(pairs.encode("hello the thing").value(), strings.encode("hello the thing").value());
}

}  // namespace
}  // namespace espalier
