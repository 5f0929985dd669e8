// A small tokenizer.json for the tests: 256 byte tokens, a few merges, the markers of the chat encoding.
#pragma once

#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "format/json.h"
#include "text/byte_alphabet.h"
#include "text/tokenizer.h"

namespace espalier::testing {

// The same numbers on every platform.
class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  uint64_t next() { return engine_(); }

 private:
  std::mt19937_64 engine_;
};

inline const std::vector<std::string>& chat_markers() {
  static const std::vector<std::string> markers = {"<｜begin▁of▁sentence｜>",
                                                   "<｜end▁of▁sentence｜>",
                                                   "<｜System｜>",
                                                   "<｜User｜>",
                                                   "<｜Assistant｜>",
                                                   "<think>",
                                                   "</think>",
                                                   "｜DSML｜",
                                                   "<｜latest_reminder｜>",
                                                   "<｜action｜>",
                                                   "<｜title｜>",
                                                   "<｜deepseek_image｜>"};
  return markers;
}

// Byte b has the id b; merges follow, then the markers (the first two special, the rest not).
inline Json small_tokenizer_json() {
  Json vocab = Json::object();
  for (int b = 0; b < 256; ++b) vocab[token_of_bytes(std::string(1, static_cast<char>(b)))] = b;
  Json merges = Json::array();
  const std::vector<std::pair<std::string, std::string>> pairs = {
      {"Ġ", "t"},  {"h", "e"},  {"Ġt", "he"}, {"a", "a"},    {"aa", "aa"}, {"i", "n"},
      {"in", "g"}, {"l", "l"},  {"he", "ll"}, {"hell", "o"}, {"Ġ", "Ġ"},   {"ĠĠ", "ĠĠ"},
      {"ä", "½"},  {"ä½", "ł"}, {"Ċ", "Ċ"},   {"a", "b"},    {"b", "c"}};
  int next = 256;
  for (const auto& [left, right] : pairs) {
    vocab[left + right] = next++;
    merges.push_back(left + " " + right);
  }
  Json added = Json::array();
  for (size_t i = 0; i < chat_markers().size(); ++i) {
    added.push_back({{"id", next++},
                     {"content", chat_markers()[i]},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", i >= 2},
                     {"special", i < 2}});
  }
  const auto split = [](const char* regex) {
    return Json{{"type", "Split"}, {"pattern", {{"Regex", regex}}}, {"behavior", "Isolated"}, {"invert", false}};
  };
  Json steps = Json::array();
  steps.push_back(split("\\p{N}{1,3}"));
  steps.push_back(split("[一-龥぀-ゟ゠-ヿ]+"));
  steps.push_back(
      split("[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| "
            "?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"));
  steps.push_back({{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}});
  const Json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", true}, {"use_regex", true}};
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", added},
          {"normalizer", {{"type", "Sequence"}, {"normalizers", Json::array()}}},
          {"pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", steps}}},
          {"post_processor", byte_level},
          {"decoder", byte_level},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"continuing_subword_prefix", nullptr},
            {"end_of_word_suffix", nullptr},
            {"fuse_unk", false},
            {"byte_fallback", false},
            {"vocab", vocab},
            {"merges", merges}}}};
}

inline Tokenizer parse_tokenizer(const Json& json) {
  return Tokenizer::parse(dump_json(json), "test").value();
}

inline Tokenizer small_tokenizer() {
  return parse_tokenizer(small_tokenizer_json());
}

}  // namespace espalier::testing
