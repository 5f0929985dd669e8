#include "text/tokenizer.h"

#include <unordered_map>

#include "base/file.h"
#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/byte_alphabet.h"
#include "text/pre_tokenizer.h"
#include "text/tokenizer_file.h"
#include "text/utf8.h"

namespace espalier {
namespace {

constexpr uint64_t kMaxFileBytes = uint64_t{256} << 20;
constexpr size_t kMaxTextBytes = size_t{1} << 31;
constexpr size_t kMaxCachedPiece = 48;  // bytes
constexpr size_t kMaxCacheEntries = 1 << 16;

}  // namespace

struct Tokenizer::Impl {
  Impl(TokenizerFile parsed, PreTokenizer pre)
      : file(std::move(parsed)), pre_tokenizer(std::move(pre)), merger(file.byte_ids, file.merges) {}

  TokenizerFile file;
  PreTokenizer pre_tokenizer;
  BytePairMerger merger;
  AddedTokenMatcher raw_added;         // searched first
  AddedTokenMatcher normalized_added;  // searched in what is left
  std::vector<uint8_t> is_added, is_special;
  std::string bytes;                 // of all tokens, one after the other
  std::vector<size_t> byte_offsets;  // [n_tokens + 1]

  // Encodes text without added tokens. Pieces repeat in long texts, so their ids are kept for the length of a call.
  class PieceEncoder {
   public:
    explicit PieceEncoder(const Impl& impl) : impl_(impl) {}

    Status encode(std::string_view text, std::vector<int32_t>& out) {
      pieces_.clear();
      RETURN_IF_ERROR(impl_.pre_tokenizer.split(text, scratch_, pieces_));
      for (const TextRange& range : pieces_) encode_piece(text.substr(range.begin, range.end - range.begin), out);
      return ok_status();
    }

   private:
    void encode_piece(std::string_view piece, std::vector<int32_t>& out) {
      const size_t start = out.size();
      if (piece.size() <= kMaxCachedPiece) {
        if (const auto it = cache_.find(piece); it != cache_.end()) {
          out.insert(out.end(), it->second.begin(), it->second.end());
          return;
        }
      }
      if (impl_.file.ignore_merges) {
        if (const auto it = impl_.file.ids.find(token_of_bytes(piece)); it != impl_.file.ids.end())
          out.push_back(it->second);
      }
      if (out.size() == start) impl_.merger.merge(piece, out);
      if (piece.size() <= kMaxCachedPiece && cache_.size() < kMaxCacheEntries) {
        cache_.emplace(piece, std::vector<int32_t>(out.begin() + static_cast<std::ptrdiff_t>(start), out.end()));
      }
    }

    const Impl& impl_;
    SplitPattern::Scratch scratch_;
    std::vector<TextRange> pieces_;
    std::unordered_map<std::string_view, std::vector<int32_t>> cache_;  // keys point into the text
  };

  // Added tokens inside the trusted ranges of `text`: first those that are matched on raw text, then the rest in
  // between.
  std::vector<AddedTokenMatch> find_added(std::string_view text, const std::vector<TextRange>& trusted) const {
    std::vector<AddedTokenMatch> first, all;
    for (const TextRange& range : trusted) {
      first.clear();
      raw_added.find(text, range.begin, range.end, first);
      size_t at = range.begin;
      for (const AddedTokenMatch& match : first) {
        normalized_added.find(text, at, match.begin, all);
        all.push_back(match);
        at = match.end;
      }
      normalized_added.find(text, at, range.end, all);
    }
    return all;
  }

  // `text` is valid UTF-8; trusted ranges are sorted and do not touch.
  Result<std::vector<int32_t>> encode(std::string_view text, const std::vector<TextRange>& trusted) const {
    if (text.size() > kMaxTextBytes) {
      return resource_exhausted("encode: the text has " + std::to_string(text.size()) + " bytes, at most " +
                                std::to_string(kMaxTextBytes) + " are encoded at once");
    }
    std::vector<int32_t> out;
    PieceEncoder pieces(*this);
    size_t at = 0;
    for (const AddedTokenMatch& match : find_added(text, trusted)) {
      RETURN_IF_ERROR(pieces.encode(text.substr(at, match.begin - at), out));
      out.push_back(match.id);
      at = match.end;
    }
    RETURN_IF_ERROR(pieces.encode(text.substr(at), out));
    return out;
  }
};

Tokenizer::Tokenizer(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;

Result<Tokenizer> Tokenizer::open(const std::filesystem::path& path) {
  std::error_code ignored;
  const std::filesystem::path file = std::filesystem::is_directory(path, ignored) ? path / "tokenizer.json" : path;
  ASSIGN_OR_RETURN(const std::string text, read_text_file(file, kMaxFileBytes));
  return parse(text, "'" + file.string() + "'");
}

Result<Tokenizer> Tokenizer::parse(std::string_view json, std::string_view name) {
  ASSIGN_OR_RETURN(TokenizerFile file, parse_tokenizer_file(json, name));
  auto pre_tokenizer = PreTokenizer::compile(file.splits);
  if (!pre_tokenizer.ok()) return std::move(pre_tokenizer).error().with_context(name);
  auto impl = std::make_unique<Impl>(std::move(file), std::move(pre_tokenizer).value());
  const size_t n_tokens = impl->file.tokens.size();
  impl->is_added.resize(n_tokens);
  impl->is_special.resize(n_tokens);
  std::vector<std::pair<std::string_view, int32_t>> raw, normalized;
  for (const AddedToken& token : impl->file.added) {
    (token.is_normalized ? normalized : raw).emplace_back(token.content, token.id);
    impl->is_added[static_cast<size_t>(token.id)] = 1;
    impl->is_special[static_cast<size_t>(token.id)] = token.is_special ? 1 : 0;
  }
  impl->raw_added = AddedTokenMatcher(raw);
  impl->normalized_added = AddedTokenMatcher(normalized);
  impl->byte_offsets.push_back(0);
  for (const std::string& token : impl->file.tokens) {
    // A spelling outside the byte alphabet (many added tokens) stands for itself, as in the reference's decoder.
    const auto bytes = bytes_of_token(token);
    impl->bytes += bytes ? *bytes : token;
    impl->byte_offsets.push_back(impl->bytes.size());
  }
  return Tokenizer(std::move(impl));
}

Result<std::vector<int32_t>> Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  std::string repaired;
  if (!is_valid_utf8(text)) text = repaired = to_valid_utf8(text);
  std::vector<TextRange> trusted;
  if (options.special_tokens_in_text) trusted.push_back({0, text.size()});
  ASSIGN_OR_RETURN(std::vector<int32_t> ids, impl_->encode(text, trusted));
  if (options.add_template) {
    ids.insert(ids.begin(), impl_->file.template_before.begin(), impl_->file.template_before.end());
    ids.insert(ids.end(), impl_->file.template_after.begin(), impl_->file.template_after.end());
  }
  return ids;
}

Result<std::vector<int32_t>> Tokenizer::encode_spans(std::span<const PromptSpan> spans) const {
  std::string text;
  std::vector<TextRange> trusted;
  for (const PromptSpan& span : spans) {
    const size_t begin = text.size();
    text += is_valid_utf8(span.text) ? std::string(span.text) : to_valid_utf8(span.text);
    if (!span.trusted || text.size() == begin) continue;
    if (!trusted.empty() && trusted.back().end == begin) {
      trusted.back().end = text.size();
    } else {
      trusted.push_back({begin, text.size()});
    }
  }
  return impl_->encode(text, trusted);
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special) const {
  std::string bytes;
  for (const int32_t id : ids) {
    if (!skip_special || !is_special(id)) bytes += token_bytes(id);
  }
  return is_valid_utf8(bytes) ? bytes : to_valid_utf8(bytes);
}

Status Tokenizer::check_ids(std::span<const int32_t> ids) const {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= n_tokens()) {
      return invalid_argument("token ids: expected 0 to " + std::to_string(n_tokens() - 1) + ", found " +
                              std::to_string(ids[i]) + " at position " + std::to_string(i));
    }
  }
  return ok_status();
}

int32_t Tokenizer::n_tokens() const {
  return static_cast<int32_t>(impl_->file.tokens.size());
}

std::string_view Tokenizer::token_bytes(int32_t id) const {
  if (id < 0 || id >= n_tokens()) return {};
  const size_t i = static_cast<size_t>(id);
  return std::string_view(impl_->bytes)
      .substr(impl_->byte_offsets[i], impl_->byte_offsets[i + 1] - impl_->byte_offsets[i]);
}

std::string_view Tokenizer::id_to_token(int32_t id) const {
  if (id < 0 || id >= n_tokens()) return {};
  return impl_->file.tokens[static_cast<size_t>(id)];
}

std::optional<int32_t> Tokenizer::id_of(std::string_view token) const {
  const auto it = impl_->file.ids.find(std::string(token));
  if (it == impl_->file.ids.end()) return std::nullopt;
  return it->second;
}

bool Tokenizer::is_special(int32_t id) const {
  return id >= 0 && id < n_tokens() && impl_->is_special[static_cast<size_t>(id)] != 0;
}
bool Tokenizer::is_added(int32_t id) const {
  return id >= 0 && id < n_tokens() && impl_->is_added[static_cast<size_t>(id)] != 0;
}

}  // namespace espalier
