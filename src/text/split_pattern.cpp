#include "text/split_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>

#include "text/unicode_tables.h"
#include "text/utf8.h"

namespace espalier {
namespace {

constexpr uint32_t kHeapLimitKib = 1u << 20;  // of one match in the interpreter, used only where there is no JIT
constexpr uint64_t kStepsPerByte = 64;        // a pattern that needs more backtracking than this is refused at run time
constexpr uint64_t kStepsAtLeast = 1u << 20;

std::string pcre_message(int code) {
  PCRE2_UCHAR buffer[256];
  pcre2_get_error_message(code, buffer, sizeof buffer);
  return reinterpret_cast<const char*>(buffer);
}

}  // namespace

struct SplitPattern::Code {
  pcre2_code* code = nullptr;
  ~Code() { pcre2_code_free(code); }
};

struct SplitPattern::Scratch::Data {
  pcre2_match_data* match = pcre2_match_data_create(1, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  ~Data() {
    pcre2_match_context_free(context);
    pcre2_match_data_free(match);
  }
};

SplitPattern::Scratch::Scratch() : data_(std::make_unique<Data>()) {
  if (data_->match == nullptr || data_->context == nullptr) throw std::bad_alloc();
  pcre2_set_heap_limit(data_->context, kHeapLimitKib);
}
SplitPattern::Scratch::~Scratch() = default;

SplitPattern::SplitPattern(std::unique_ptr<Code> code) : code_(std::move(code)) {}
SplitPattern::~SplitPattern() = default;
SplitPattern::SplitPattern(SplitPattern&&) noexcept = default;
SplitPattern& SplitPattern::operator=(SplitPattern&&) noexcept = default;

Result<SplitPattern> SplitPattern::compile(const std::string& regex) {
  RETURN_IF_ERROR(check_split_syntax(regex));
  return compile_checked(regex, false);
}

Result<SplitPattern> SplitPattern::compile_literal(const std::string& text) {
  return compile_checked(text, true);
}

Result<SplitPattern> SplitPattern::compile_checked(const std::string& regex, bool literal) {
  int error = 0;
  PCRE2_SIZE at = 0;
  const uint32_t options = PCRE2_UTF | (literal ? PCRE2_LITERAL : PCRE2_UCP);
  auto code = std::make_unique<Code>();
  code->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(regex.data()), regex.size(), options, &error, &at, nullptr);
  if (code->code == nullptr) {
    return data_loss("split pattern: " + pcre_message(error) + " at byte " + std::to_string(at));
  }
  uint32_t matches_empty = 0;
  pcre2_pattern_info(code->code, PCRE2_INFO_MATCHEMPTY, &matches_empty);
  if (matches_empty != 0) return data_loss("split pattern: it can match the empty string, which cuts nothing");
  // Without JIT (a hardened kernel) the interpreter gives the same matches, slower.
  pcre2_jit_compile(code->code, PCRE2_JIT_COMPLETE);
  return SplitPattern(std::move(code));
}

Status SplitPattern::find_all(std::string_view text, TextRange range, Scratch& scratch,
                              std::vector<TextRange>& out) const {
  const auto subject = reinterpret_cast<PCRE2_SPTR>(text.data() + range.begin);
  const size_t size = range.end - range.begin;
  const uint64_t steps = std::min<uint64_t>(UINT32_MAX, kStepsAtLeast + kStepsPerByte * size);
  pcre2_set_match_limit(scratch.data_->context, static_cast<uint32_t>(steps));
  for (size_t at = 0; at < size;) {
    uint32_t options = PCRE2_NO_UTF_CHECK;
    int found = pcre2_match(code_->code, subject, size, at, options, scratch.data_->match, scratch.data_->context);
    if (found == PCRE2_ERROR_JIT_STACKLIMIT) {
      options |= PCRE2_NO_JIT;
      found = pcre2_match(code_->code, subject, size, at, options, scratch.data_->match, scratch.data_->context);
    }
    if (found == PCRE2_ERROR_NOMATCH) break;
    if (found < 0) {
      return resource_exhausted("split pattern: " + pcre_message(found) + " in " + std::to_string(size) +
                                " bytes of text; use a tokenizer.json whose patterns do not backtrack");
    }
    const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(scratch.data_->match);
    if (bounds[1] <= bounds[0] || bounds[0] < at) return internal_error("split pattern: a match is empty or goes back");
    out.push_back({range.begin + bounds[0], range.begin + bounds[1]});
    at = bounds[1];
  }
  return ok_status();
}

std::string shadow_of(std::string_view text) {
  const auto rows = unicode::substitutes();
  std::string shadow;
  for (size_t at = 0; at < text.size();) {
    if (static_cast<uint8_t>(text[at]) < 0xE0) {  // the table begins beyond two-byte sequences
      ++at;
      continue;
    }
    const Utf8Unit unit = next_utf8(text, at);
    if (const auto* row = unicode::find_range(rows, unit.code_point)) {
      if (shadow.empty()) shadow = text;
      std::string stand_in;
      append_utf8(row->stand_in, stand_in);
      shadow.replace(at, unit.size, stand_in);
    }
    at += unit.size;
  }
  return shadow;
}

}  // namespace espalier
