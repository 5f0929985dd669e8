// A tokenizer.json, checked and taken apart: plain values that the tokenizer is built from.
//
// Pure function over bytes. Every part of the format that changes ids or text is either read or refused by name;
// nothing is guessed. Format: docs/formats/tokenizer.md.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "text/bpe.h"

namespace espalier {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool is_special = false;
  bool is_normalized = false;  // searched in a second pass, after those that are not
};

enum class SplitBehavior { kIsolated, kRemoved, kContiguous, kMergedWithPrevious, kMergedWithNext };

struct SplitStep {
  std::string pattern;
  bool is_literal = false;
  SplitBehavior behavior = SplitBehavior::kIsolated;
  bool is_inverted = false;
};

struct TokenizerFile {
  std::vector<std::string> tokens;                       // [n_tokens] spelling by id, added tokens included
  std::unordered_map<std::string, int32_t> ids;          // the inverse
  std::array<int32_t, 256> byte_ids{};                   // token of every single byte
  std::vector<Merge> merges;                             // by rank
  bool ignore_merges = false;                            // a piece that is a token as a whole is not merged
  std::vector<SplitStep> splits;                         // before the bytes are mapped
  std::vector<AddedToken> added;                         // by id
  std::vector<int32_t> template_before, template_after;  // ids that the post-processor puts around a text
};

// Errors: data_loss, unimplemented; messages start with `name` and the path inside the file.
Result<TokenizerFile> parse_tokenizer_file(std::string_view json, std::string_view name);

}  // namespace espalier
