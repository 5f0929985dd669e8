#include "text/pre_tokenizer.h"

#include <algorithm>
#include <string>

namespace espalier {
namespace {

struct Part {
  TextRange range;
  bool is_match;
};

// Matches and the gaps between them.
void list_parts(TextRange fragment, const std::vector<TextRange>& matches, bool is_inverted, std::vector<Part>& out) {
  out.clear();
  size_t at = fragment.begin;
  for (const TextRange& match : matches) {
    if (at < match.begin) out.push_back({{at, match.begin}, is_inverted});
    out.push_back({match, !is_inverted});
    at = match.end;
  }
  if (at < fragment.end) out.push_back({{at, fragment.end}, is_inverted});
}

void apply(SplitBehavior behavior, std::vector<Part>& parts, std::vector<TextRange>& out) {
  bool joins = false;  // the next match belongs to the piece before it
  const size_t first = out.size();
  switch (behavior) {
    case SplitBehavior::kIsolated:
      for (const Part& part : parts) out.push_back(part.range);
      break;
    case SplitBehavior::kRemoved:
      for (const Part& part : parts) {
        if (!part.is_match) out.push_back(part.range);
      }
      break;
    case SplitBehavior::kContiguous:
      for (size_t i = 0; i < parts.size(); ++i) {
        if (i > 0 && parts[i].is_match == parts[i - 1].is_match) {
          out.back().end = parts[i].range.end;
        } else {
          out.push_back(parts[i].range);
        }
      }
      break;
    case SplitBehavior::kMergedWithPrevious:  // only the first of adjacent matches joins
      for (const Part& part : parts) {
        if (part.is_match && joins && out.size() > first) {
          out.back().end = part.range.end;
        } else {
          out.push_back(part.range);
        }
        joins = !part.is_match;
      }
      break;
    case SplitBehavior::kMergedWithNext:
      for (size_t i = parts.size(); i-- > 0;) {
        if (parts[i].is_match && joins && out.size() > first) {
          out.back().begin = parts[i].range.begin;
        } else {
          out.push_back(parts[i].range);
        }
        joins = !parts[i].is_match;
      }
      std::reverse(out.begin() + static_cast<std::ptrdiff_t>(first), out.end());
      break;
  }
}

}  // namespace

Result<PreTokenizer> PreTokenizer::compile(const std::vector<SplitStep>& steps) {
  PreTokenizer out;
  for (size_t i = 0; i < steps.size(); ++i) {
    auto pattern =
        steps[i].is_literal ? SplitPattern::compile_literal(steps[i].pattern) : SplitPattern::compile(steps[i].pattern);
    if (!pattern.ok()) return std::move(pattern).error().with_context("pre_tokenizer: split " + std::to_string(i));
    out.steps_.push_back({std::move(pattern).value(), steps[i].behavior, steps[i].is_inverted});
  }
  return out;
}

Status PreTokenizer::split(std::string_view text, SplitPattern::Scratch& scratch, std::vector<TextRange>& out) const {
  if (text.empty()) return ok_status();
  const std::string shadow = shadow_of(text);
  const std::string_view seen = shadow.empty() ? text : std::string_view(shadow);
  std::vector<TextRange> fragments{{0, text.size()}}, next, matches;
  std::vector<Part> parts;
  for (const Step& step : steps_) {
    next.clear();
    for (const TextRange& fragment : fragments) {
      matches.clear();
      RETURN_IF_ERROR(step.pattern.find_all(seen, fragment, scratch, matches));
      list_parts(fragment, matches, step.is_inverted, parts);
      apply(step.behavior, parts, next);
    }
    fragments.swap(next);
  }
  out.insert(out.end(), fragments.begin(), fragments.end());
  return ok_status();
}

}  // namespace espalier
