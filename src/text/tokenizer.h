// Text to token ids and back: byte-level BPE as a Hugging Face tokenizer.json describes it.
//
// Ids equal those of PyPI `tokenizers` for every text (tests/oracle/text_oracle.py); what of the format is read, and
// what is refused by name, is in docs/formats/tokenizer.md. Added tokens ("<think>") are found first, then split
// patterns cut the text between them into pieces, then every piece is merged by rank. Time is O(n log n) in the longest
// piece. Bytes that are not UTF-8 are read as U+FFFD, one for each maximal ill-formed part, as Python's
// errors="replace" does. Threads: immutable after open; concurrent calls are fine.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace espalier {

struct EncodeOptions {
  bool special_tokens_in_text = true;  // false: "<think>" in the text is ordinary text
  bool add_template = false;  // also the ids that the file's post-processor puts around a text, when it has any
};

// A part of a prompt. Added tokens are recognised inside runs of trusted text only, so that a user's text cannot forge
// them.
struct PromptSpan {
  std::string_view text;
  bool trusted = false;
};

class Tokenizer {
 public:
  // `path`: a tokenizer.json or a folder that holds one.
  // Errors: not_found, data_loss (not what the format demands), unimplemented (a part of the format that is not read).
  static Result<Tokenizer> open(const std::filesystem::path& path);
  // The bytes of a tokenizer.json; `name` names them in messages.
  static Result<Tokenizer> parse(std::string_view json, std::string_view name);

  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  // Errors: resource_exhausted when a split pattern exceeds its matching limits (not with DeepSeek's patterns).
  Result<std::vector<int32_t>> encode(std::string_view text, const EncodeOptions& options = {}) const;
  // The spans joined are one text: pieces and merges cross their borders, only added tokens stay inside trusted runs.
  Result<std::vector<int32_t>> encode_spans(std::span<const PromptSpan> spans) const;

  // Ids outside 0..n_tokens()-1 decode to nothing; check_ids() tells. Ill-formed UTF-8 becomes U+FFFD.
  std::string decode(std::span<const int32_t> ids, bool skip_special = false) const;
  // ok, or invalid_argument naming the first id that is no token.
  Status check_ids(std::span<const int32_t> ids) const;

  // 1 + the largest id, added tokens included; every id below it is a token.
  int32_t n_tokens() const;
  // The exact bytes of a token; empty for an id that is no token.
  std::string_view token_bytes(int32_t id) const;
  // The token as the file spells it: "Ġthe", "<think>"; empty for an id that is no token.
  std::string_view id_to_token(int32_t id) const;
  std::optional<int32_t> id_of(std::string_view token) const;
  // Flagged "special" in the file (dropped by decode(…, skip_special)).
  bool is_special(int32_t id) const;
  bool is_added(int32_t id) const;

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<const Impl> impl);
  std::unique_ptr<const Impl> impl_;
};

}  // namespace espalier
