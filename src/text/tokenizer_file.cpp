#include "text/tokenizer_file.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "format/json.h"
#include "text/byte_alphabet.h"
#include "text/json_fields.h"
#include "text/pipeline_file.h"

namespace espalier {
namespace {

constexpr size_t kMaxTokens = size_t{1} << 24;
constexpr size_t kMaxAddedTokenBytes = 512;  // bounds the time of the search at every byte of a text

class Reader {
 public:
  explicit Reader(std::string_view name) : name_(name) {}

  Result<TokenizerFile> read(const Json& root) {
    RETURN_IF_ERROR(expect_object(root, name_,
                                  {"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
                                   "post_processor", "decoder", "model"}));
    for (const std::string_view key : {"truncation", "padding"}) {
      if (const Json* value = find_member(root, key)) {
        return unimplemented(name_ + "." + std::string(key) + ": expected null, found " + describe_json(*value) +
                             "; a text is never cut or padded here");
      }
    }
    const Json* model = find_member(root, "model");
    if (model == nullptr) return data_loss(name_ + ".model: expected an object, found nothing");
    RETURN_IF_ERROR(read_model(*model));
    if (const Json* added = find_member(root, "added_tokens")) RETURN_IF_ERROR(read_added(*added));
    RETURN_IF_ERROR(check_ids());
    RETURN_IF_ERROR(read_pipeline(root, name_, file_));
    return std::move(file_);
  }

 private:
  Status read_model(const Json& model) {
    const std::string where = name_ + ".model";
    RETURN_IF_ERROR(expect_object(model, where,
                                  {"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
                                   "fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"}));
    ASSIGN_OR_RETURN(const std::string type, string_member(model, "type", where));
    if (type != "BPE") return unimplemented(where + ".type: expected \"BPE\", found \"" + type.substr(0, 40) + "\"");
    ASSIGN_OR_RETURN(const bool byte_fallback, bool_member(model, "byte_fallback", false, where));
    if (byte_fallback)
      return unimplemented(where + ".byte_fallback: expected false, found true; only byte-level BPE is read");
    if (const Json* dropout = find_member(model, "dropout"); dropout != nullptr && *dropout != 0.0) {
      return unimplemented(where + ".dropout: expected null, found " + describe_json(*dropout) +
                           "; ids would be random");
    }
    for (const std::string_view key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      if (const Json* value = find_member(model, key); value != nullptr && *value != "") {
        return unimplemented(where + "." + std::string(key) + ": expected null, found " + describe_json(*value));
      }
    }
    ASSIGN_OR_RETURN(file_.ignore_merges, bool_member(model, "ignore_merges", false, where));
    const Json* vocab = find_member(model, "vocab");
    if (vocab == nullptr || !vocab->is_object()) return data_loss(where + ".vocab: expected an object of token ids");
    RETURN_IF_ERROR(read_vocab(*vocab, where + ".vocab"));
    const Json* merges = find_member(model, "merges");
    if (merges == nullptr || !merges->is_array()) return data_loss(where + ".merges: expected an array of pairs");
    return read_merges(*merges, where + ".merges");
  }

  Status read_vocab(const Json& vocab, const std::string& where) {
    if (vocab.size() > kMaxTokens) {
      return data_loss(where + ": expected at most " + std::to_string(kMaxTokens) + " tokens, found " +
                       std::to_string(vocab.size()));
    }
    file_.ids.reserve(vocab.size());
    for (const auto& [token, id] : vocab.items()) {
      RETURN_IF_ERROR(add(token, id, where + "[\"" + token.substr(0, 40) + "\"]"));
    }
    for (int b = 0; b < 256; ++b) {
      const auto it = file_.ids.find(token_of_bytes(std::string(1, static_cast<char>(b))));
      if (it == file_.ids.end()) {
        return data_loss(where + ": no token for the byte " + std::to_string(b) + "; byte-level BPE needs all 256");
      }
      file_.byte_ids[static_cast<size_t>(b)] = it->second;
    }
    return ok_status();
  }

  Status add(const std::string& token, const Json& id, const std::string& where) {
    if (!id.is_number_integer() || id < 0 || id >= kMaxTokens) {
      return data_loss(where + ": expected an id from 0 to " + std::to_string(kMaxTokens - 1) + ", found " +
                       describe_json(id));
    }
    const size_t index = id.get<size_t>();
    const auto [it, is_new] = by_id_.emplace(index, token);
    if (!is_new) {
      return data_loss(where + ": the id " + std::to_string(index) + " already belongs to '" +
                       it->second.substr(0, 60) + "'");
    }
    file_.ids.emplace(token, static_cast<int32_t>(index));
    return ok_status();
  }

  Status read_merges(const Json& merges, const std::string& where) {
    std::unordered_set<uint64_t> seen;
    seen.reserve(merges.size());
    file_.merges.reserve(merges.size());
    std::string left, right;
    for (size_t rank = 0; rank < merges.size(); ++rank) {
      const Json& entry = merges[rank];
      const auto here = [&] { return where + "[" + std::to_string(rank) + "]"; };
      if (entry.is_string()) {
        const std::string& pair = entry.get_ref<const std::string&>();
        const size_t space = pair.find(' ');
        if (space == std::string::npos || pair.find(' ', space + 1) != std::string::npos) {
          return data_loss(here() + ": expected two tokens with one space between, found " + describe_json(entry));
        }
        left = pair.substr(0, space);
        right = pair.substr(space + 1);
      } else if (entry.is_array() && entry.size() == 2 && entry[0].is_string() && entry[1].is_string()) {
        left = entry[0].get<std::string>();
        right = entry[1].get<std::string>();
      } else {
        return data_loss(here() + ": expected \"left right\" or [\"left\", \"right\"], found " + describe_json(entry));
      }
      Merge merge{};
      for (const auto& [token, id] : {std::pair<std::string, int32_t*>{left, &merge.left},
                                      {right, &merge.right},
                                      {left + right, &merge.result}}) {
        const auto it = file_.ids.find(token);
        if (it == file_.ids.end()) {
          return data_loss(here() + ": '" + token.substr(0, 60) + "' is not in the vocabulary");
        }
        *id = it->second;
      }
      if (!seen.insert(static_cast<uint64_t>(merge.left) << 32 | static_cast<uint32_t>(merge.right)).second) {
        return data_loss(here() + ": the pair '" + left.substr(0, 40) + "' + '" + right.substr(0, 40) +
                         "' appears twice");
      }
      file_.merges.push_back(merge);
    }
    return ok_status();
  }

  Status read_added(const Json& added) {
    if (!added.is_array()) return data_loss(name_ + ".added_tokens: expected an array, found " + describe_json(added));
    std::unordered_set<std::string> contents;
    for (size_t i = 0; i < added.size(); ++i) {
      const std::string where = name_ + ".added_tokens[" + std::to_string(i) + "]";
      const Json& entry = added[i];
      RETURN_IF_ERROR(
          expect_object(entry, where, {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"}));
      AddedToken token;
      ASSIGN_OR_RETURN(token.content, string_member(entry, "content", where));
      if (token.content.empty() || token.content.size() > kMaxAddedTokenBytes) {
        return data_loss(where + ".content: expected 1 to " + std::to_string(kMaxAddedTokenBytes) + " bytes, found " +
                         std::to_string(token.content.size()));
      }
      if (!contents.insert(token.content).second) return data_loss(where + ": '" + token.content + "' appears twice");
      for (const std::string_view key : {"single_word", "lstrip", "rstrip"}) {
        ASSIGN_OR_RETURN(const bool value, bool_member(entry, key, false, where));
        if (value) return unimplemented(where + "." + std::string(key) + ": expected false, found true");
      }
      ASSIGN_OR_RETURN(token.is_special, bool_member(entry, "special", false, where));
      ASSIGN_OR_RETURN(token.is_normalized, bool_member(entry, "normalized", !token.is_special, where));
      const Json* id = find_member(entry, "id");
      if (id == nullptr) return data_loss(where + ".id: expected an id, found nothing");
      if (const auto it = file_.ids.find(token.content); it != file_.ids.end()) {
        if (!id->is_number_integer() || *id != it->second) {
          return data_loss(where + ".id: '" + token.content + "' has the id " + std::to_string(it->second) +
                           " in the vocabulary, found " + describe_json(*id));
        }
      } else {
        RETURN_IF_ERROR(add(token.content, *id, where + ".id"));
      }
      token.id = id->get<int32_t>();
      file_.added.push_back(std::move(token));
    }
    std::sort(file_.added.begin(), file_.added.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
    return ok_status();
  }

  Status check_ids() {
    file_.tokens.resize(by_id_.size());
    for (auto& [id, token] : by_id_) {
      if (id >= file_.tokens.size()) {
        size_t missing = 0;
        while (by_id_.count(missing) != 0) ++missing;
        return data_loss(name_ + ": expected ids without a gap, found " + std::to_string(by_id_.size()) +
                         " tokens and the id " + std::to_string(id) + ", but none with the id " +
                         std::to_string(missing));
      }
      file_.tokens[id] = token;
    }
    return ok_status();
  }

  std::string name_;
  TokenizerFile file_;
  std::unordered_map<size_t, std::string> by_id_;
};

}  // namespace

Result<TokenizerFile> parse_tokenizer_file(std::string_view json, std::string_view name) {
  ASSIGN_OR_RETURN(const Json root, parse_json(json, name));
  return Reader(name).read(root);
}

}  // namespace espalier
