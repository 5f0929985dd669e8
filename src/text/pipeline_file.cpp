#include "text/pipeline_file.h"

#include <nlohmann/json.hpp>

#include "text/json_fields.h"

namespace espalier {
namespace {

// The split of a ByteLevel step with use_regex.
constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

Result<std::string> type_of(const Json& step, const std::string& where) {
  if (!step.is_object()) return data_loss(where + ": expected an object, found " + describe_json(step));
  return string_member(step, "type", where);
}

// The steps of a Sequence under `key`, or the step itself.
Result<std::vector<const Json*>> steps_of(const Json& step, std::string_view key, const std::string& where) {
  std::vector<const Json*> out;
  ASSIGN_OR_RETURN(const std::string type, type_of(step, where));
  if (type != "Sequence") {
    out.push_back(&step);
    return out;
  }
  RETURN_IF_ERROR(expect_object(step, where, {"type", key}));
  const Json* list = find_member(step, key);
  if (list == nullptr || !list->is_array()) return data_loss(where + "." + std::string(key) + ": expected an array");
  for (const Json& entry : *list) out.push_back(&entry);
  return out;
}

Status read_normalizer(const Json* normalizer, const std::string& where) {
  if (normalizer == nullptr) return ok_status();
  ASSIGN_OR_RETURN(const auto steps, steps_of(*normalizer, "normalizers", where));
  for (const Json* step : steps) {
    ASSIGN_OR_RETURN(const std::string type, type_of(*step, where));
    return unimplemented(where + ": expected none, found '" + type.substr(0, 40) + "'; text is not normalised here");
  }
  return ok_status();
}

Result<SplitStep> read_split(const Json& step, const std::string& where) {
  RETURN_IF_ERROR(expect_object(step, where, {"type", "pattern", "behavior", "invert"}));
  SplitStep out;
  const Json* pattern = find_member(step, "pattern");
  if (pattern == nullptr || !pattern->is_object() || pattern->size() != 1) {
    return data_loss(where + ".pattern: expected {\"Regex\": …} or {\"String\": …}");
  }
  out.is_literal = find_member(*pattern, "String") != nullptr;
  ASSIGN_OR_RETURN(out.pattern, string_member(*pattern, out.is_literal ? "String" : "Regex", where + ".pattern"));
  if (out.pattern.empty()) return data_loss(where + ".pattern: expected a pattern, found an empty string");
  ASSIGN_OR_RETURN(out.is_inverted, bool_member(step, "invert", false, where));
  ASSIGN_OR_RETURN(const std::string behavior, string_member(step, "behavior", where));
  if (behavior == "Isolated") {
    out.behavior = SplitBehavior::kIsolated;
  } else if (behavior == "Removed") {
    out.behavior = SplitBehavior::kRemoved;
  } else if (behavior == "Contiguous") {
    out.behavior = SplitBehavior::kContiguous;
  } else if (behavior == "MergedWithPrevious") {
    out.behavior = SplitBehavior::kMergedWithPrevious;
  } else if (behavior == "MergedWithNext") {
    out.behavior = SplitBehavior::kMergedWithNext;
  } else {
    return data_loss(where + ".behavior: '" + behavior.substr(0, 40) +
                     "' is none of Isolated, Removed, Contiguous, MergedWithPrevious, MergedWithNext");
  }
  return out;
}

Status read_pre_tokenizer(const Json* pre_tokenizer, const std::string& where, TokenizerFile& file) {
  if (pre_tokenizer == nullptr) return unimplemented(where + ": expected a ByteLevel step, found nothing");
  ASSIGN_OR_RETURN(const auto steps, steps_of(*pre_tokenizer, "pretokenizers", where));
  bool has_byte_level = false;
  for (size_t i = 0; i < steps.size(); ++i) {
    const std::string here = where + "[" + std::to_string(i) + "]";
    ASSIGN_OR_RETURN(const std::string type, type_of(*steps[i], here));
    if (has_byte_level)
      return unimplemented(here + ": ByteLevel must be the last step, found '" + type.substr(0, 40) + "' after it");
    if (type == "Split") {
      ASSIGN_OR_RETURN(SplitStep split, read_split(*steps[i], here));
      file.splits.push_back(std::move(split));
    } else if (type == "ByteLevel") {
      RETURN_IF_ERROR(expect_object(*steps[i], here, {"type", "add_prefix_space", "trim_offsets", "use_regex"}));
      ASSIGN_OR_RETURN(const bool add_prefix_space, bool_member(*steps[i], "add_prefix_space", true, here));
      ASSIGN_OR_RETURN(const bool use_regex, bool_member(*steps[i], "use_regex", true, here));
      if (add_prefix_space) return unimplemented(here + ".add_prefix_space: expected false, found true");
      if (use_regex) file.splits.push_back({std::string(kGpt2Pattern), false, SplitBehavior::kIsolated, false});
      has_byte_level = true;
    } else {
      return unimplemented(here + ": expected Split or ByteLevel, found '" + type.substr(0, 40) + "'");
    }
  }
  if (!has_byte_level) return unimplemented(where + ": expected a ByteLevel step, found none");
  return ok_status();
}

// TemplateProcessing: what stands before and after a single text.
Status read_template(const Json& step, const std::string& where, TokenizerFile& file) {
  RETURN_IF_ERROR(expect_object(step, where, {"type", "single", "pair", "special_tokens"}));
  const Json* single = find_member(step, "single");
  const Json* specials = find_member(step, "special_tokens");
  if (single == nullptr || !single->is_array()) return data_loss(where + ".single: expected an array");
  bool seen_text = false;
  for (const Json& piece : *single) {
    if (!piece.is_object() || piece.size() != 1)
      return data_loss(where + ".single: expected {\"SpecialToken\"} or {\"Sequence\"}");
    if (piece.contains("Sequence")) {
      if (seen_text) return unimplemented(where + ".single: expected the text once, found it twice");
      seen_text = true;
      continue;
    }
    const Json* special = find_member(piece, "SpecialToken");
    if (special == nullptr || !special->is_object())
      return data_loss(where + ".single: expected {\"SpecialToken\": {…}}");
    ASSIGN_OR_RETURN(const std::string id, string_member(*special, "id", where + ".single"));
    const Json* entry = specials != nullptr && specials->is_object() ? find_member(*specials, id) : nullptr;
    const Json* ids = entry != nullptr && entry->is_object() ? find_member(*entry, "ids") : nullptr;
    if (ids == nullptr || !ids->is_array())
      return data_loss(where + ".special_tokens: no ids for '" + id.substr(0, 60) + "'");
    for (const Json& value : *ids) {
      if (!value.is_number_integer() || value < 0 || value >= file.tokens.size()) {
        return data_loss(where + ".special_tokens['" + id.substr(0, 60) + "']: expected ids below " +
                         std::to_string(file.tokens.size()) + ", found " + describe_json(value));
      }
      (seen_text ? file.template_after : file.template_before).push_back(value.get<int32_t>());
    }
  }
  if (!seen_text) return data_loss(where + ".single: the text itself is missing");
  return ok_status();
}

Status read_post_processor(const Json* post_processor, const std::string& where, TokenizerFile& file) {
  if (post_processor == nullptr) return ok_status();
  ASSIGN_OR_RETURN(const auto steps, steps_of(*post_processor, "processors", where));
  bool has_template = false;
  for (const Json* step : steps) {
    ASSIGN_OR_RETURN(const std::string type, type_of(*step, where));
    if (type == "ByteLevel") continue;  // moves offsets only; ids stay
    if (type != "TemplateProcessing" || has_template) {
      return unimplemented(where + ": expected ByteLevel and at most one TemplateProcessing, found '" +
                           type.substr(0, 40) + "'");
    }
    RETURN_IF_ERROR(read_template(*step, where, file));
    has_template = true;
  }
  return ok_status();
}

Status read_decoder(const Json* decoder, const std::string& where) {
  if (decoder == nullptr) return unimplemented(where + ": expected ByteLevel, found nothing");
  ASSIGN_OR_RETURN(const auto steps, steps_of(*decoder, "decoders", where));
  for (const Json* step : steps) {
    ASSIGN_OR_RETURN(const std::string type, type_of(*step, where));
    if (type != "ByteLevel") return unimplemented(where + ": expected ByteLevel, found '" + type.substr(0, 40) + "'");
  }
  if (steps.size() != 1)
    return unimplemented(where + ": expected one ByteLevel step, found " + std::to_string(steps.size()));
  return ok_status();
}

}  // namespace

Status read_pipeline(const Json& root, const std::string& name, TokenizerFile& file) {
  RETURN_IF_ERROR(read_normalizer(find_member(root, "normalizer"), name + ".normalizer"));
  RETURN_IF_ERROR(read_pre_tokenizer(find_member(root, "pre_tokenizer"), name + ".pre_tokenizer", file));
  RETURN_IF_ERROR(read_post_processor(find_member(root, "post_processor"), name + ".post_processor", file));
  return read_decoder(find_member(root, "decoder"), name + ".decoder");
}

}  // namespace espalier
