#include "text/engram_map.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <unordered_map>

#include "text/unicode_tables.h"
#include "text/utf8.h"

namespace espalier {
namespace {

struct FreeDeleter {
  void operator()(utf8proc_uint8_t* p) const { std::free(p); }
};

Result<std::string> map_form(std::string_view text, int form) {
  utf8proc_uint8_t* raw = nullptr;
  const utf8proc_ssize_t size =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()),
                   &raw, static_cast<utf8proc_option_t>(UTF8PROC_STABLE | form));
  const std::unique_ptr<utf8proc_uint8_t, FreeDeleter> owner(raw);
  if (size < 0) return internal_error(std::string("normalisation: ") + utf8proc_errmsg(size));
  return std::string(reinterpret_cast<const char*>(raw), static_cast<size_t>(size));
}

// A normalisation form as of Unicode 9: code points that later versions changed stand between the parts, untouched. To
// Unicode 9 they are unassigned, hence starters without decomposition, so nothing composes or reorders across them.
Result<std::string> normal_form(std::string_view text, int form) {
  const auto inert = unicode::inert_in_normalization();
  std::string out;
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const Utf8Unit unit = next_utf8(text, at);
    if (unicode::find_range(inert, unit.code_point) != nullptr) {
      ASSIGN_OR_RETURN(const std::string part, map_form(text.substr(begin, at - begin), form));
      out += part;
      out += text.substr(at, unit.size);
      begin = at + unit.size;
    }
    at += unit.size;
  }
  ASSIGN_OR_RETURN(const std::string rest, map_form(text.substr(begin), form));
  return out + rest;
}

void append_lower(uint32_t c, std::string& out) {
  if (c == 0x130) {  // the one lower case of two code points
    out += "i\u0307";
    return;
  }
  const auto rows = unicode::lower_case();
  size_t low = 0, high = rows.size();
  while (low < high) {
    const size_t mid = (low + high) / 2;
    (rows[mid].from < c ? low : high) = rows[mid].from < c ? mid + 1 : mid;
  }
  const bool found = low < rows.size() && rows[low].from == c;
  append_utf8(found ? rows[low].to : static_cast<uint32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c))), out);
}

// Unicode White_Space.
bool is_white_space(uint32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

// Accents dropped, lower case, runs of space, tab, CR, LF to one space.
std::string fold(std::string_view text) {
  const auto marks = unicode::combining_marks();
  std::string plain;
  for (size_t at = 0; at < text.size();) {
    const Utf8Unit unit = next_utf8(text, at);
    if (unicode::find_range(marks, unit.code_point) == nullptr) append_lower(unit.code_point, plain);
    at += unit.size;
  }
  std::string out;
  for (const char c : plain) {
    if (c == ' ' || c == '\t' || c == '\r' || c == '\n') {
      if (out.empty() || out.back() != ' ') out += ' ';
    } else {
      out += c;
    }
  }
  return out;
}

std::string strip(std::string_view text) {
  size_t begin = text.size(), end = 0;
  for (size_t at = 0; at < text.size();) {
    const Utf8Unit unit = next_utf8(text, at);
    if (!is_white_space(unit.code_point)) {
      begin = std::min(begin, at);
      end = at + unit.size;
    }
    at += unit.size;
  }
  return begin < end ? std::string(text.substr(begin, end - begin)) : "";
}

}  // namespace

Result<std::string> normalize_for_engram(std::string_view text) {
  ASSIGN_OR_RETURN(const std::string nfkc, normal_form(text, UTF8PROC_COMPOSE | UTF8PROC_COMPAT));
  ASSIGN_OR_RETURN(const std::string nfd, normal_form(nfkc, UTF8PROC_DECOMPOSE));
  const std::string folded = fold(nfd);
  // A single space survives the strip; U+E000, which stands for it in the reference, becomes a space everywhere.
  std::string out = folded == " " ? folded : strip(folded);
  constexpr std::string_view kStandIn = "\uE000";
  for (size_t at = out.find(kStandIn); at != std::string::npos; at = out.find(kStandIn, at + 1)) {
    out.replace(at, kStandIn.size(), " ");
  }
  return out;
}

Result<EngramMap> build_engram_map(const Tokenizer& tokenizer) {
  EngramMap map;
  std::unordered_map<std::string, int32_t> classes;
  for (int32_t id = 0; id < tokenizer.n_tokens(); ++id) {
    std::string key = tokenizer.decode({&id, 1});
    if (key.find(kReplacement) != std::string::npos) {
      key = tokenizer.id_to_token(id);
    } else {
      ASSIGN_OR_RETURN(std::string normal, normalize_for_engram(key));
      if (!normal.empty()) key = std::move(normal);
    }
    const auto [it, is_new] = classes.emplace(std::move(key), map.n_classes);
    if (is_new) ++map.n_classes;
    map.class_of.push_back(it->second);
  }
  return map;
}

}  // namespace espalier
