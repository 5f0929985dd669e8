#include "stages/calibrate/dataset_builder.h"

#include <algorithm>
#include <numeric>

#include "base/hash.h"

namespace espalier {
namespace {

constexpr std::string_view kBegin = "<｜begin▁of▁sentence｜>";
constexpr std::string_view kEnd = "<｜end▁of▁sentence｜>";
constexpr std::string_view kUser = "<｜User｜>";
constexpr std::string_view kAssistant = "<｜Assistant｜>";
constexpr std::string_view kThinkOpen = "<think>";
constexpr std::string_view kThinkClose = "</think>";
constexpr std::string_view kDsml = "｜DSML｜";

Result<int32_t> marker_id(const Tokenizer& tokenizer, std::string_view marker) {
  if (const auto id = tokenizer.id_of(marker)) return *id;
  return failed_precondition("panel build: the tokenizer has no token '" + std::string(marker) +
                             "'; use a DeepSeek V4.1 tokenizer.json");
}

uint8_t role(TokenRole r) {
  return static_cast<uint8_t>(r);
}

}  // namespace

bool is_in_part(const DocumentPart& part, std::string_view document) {
  const std::string digest = sha256_hex(document);
  uint64_t value = 0;
  for (char c : digest.substr(0, 16)) value = value * 16 + static_cast<uint64_t>(c <= '9' ? c - '0' : c - 'a' + 10);
  const auto place = static_cast<int64_t>(value % static_cast<uint64_t>(part.of));
  return place >= part.first && place <= part.last;
}

Result<std::vector<DatasetRow>> rows_of_text(const Tokenizer& tokenizer, const std::string& document,
                                             std::string_view text, int64_t length, const RowLabels& labels) {
  ASSIGN_OR_RETURN(const int32_t begin, marker_id(tokenizer, kBegin));
  EncodeOptions plain;
  plain.special_tokens_in_text = false;
  ASSIGN_OR_RETURN(const std::vector<int32_t> ids, tokenizer.encode(text, plain));
  std::vector<DatasetRow> out;
  const int64_t stretch = length - 1;
  const auto n = static_cast<int64_t>(ids.size());
  for (int64_t at = 0; at < n; at += stretch) {
    const int64_t end = std::min(n, at + stretch);
    if (at > 0 && 2 * (end - at) < stretch) break;
    DatasetRow row;
    row.id = document + "@" + std::to_string(at);
    row.domain = labels.domain;
    row.mode = "raw";
    row.source = labels.source;
    row.licence = labels.licence;
    row.ids.push_back(begin);
    row.ids.insert(row.ids.end(), ids.begin() + at, ids.begin() + end);
    row.role_mask.assign(row.ids.size(), role(TokenRole::kRaw));
    out.push_back(std::move(row));
  }
  return out;
}

Result<DatasetRow> row_of_chat(const Tokenizer& tokenizer, const std::string& name, ChatRequest request, bool thinks,
                               const RowLabels& labels) {
  request.thinking = thinks;
  request.add_generation_prompt = false;
  request.parse_special_in_content = false;
  ASSIGN_OR_RETURN(RenderedPrompt prompt, render_chat(tokenizer, request));
  if (prompt.n_images > 0) return invalid_argument("conversation '" + name + "' holds an image; data sets are text");
  ASSIGN_OR_RETURN(const int32_t assistant, marker_id(tokenizer, kAssistant));
  ASSIGN_OR_RETURN(const int32_t end, marker_id(tokenizer, kEnd));
  ASSIGN_OR_RETURN(const int32_t open, marker_id(tokenizer, kThinkOpen));
  ASSIGN_OR_RETURN(const int32_t close, marker_id(tokenizer, kThinkClose));
  DatasetRow row;
  row.id = name;
  row.domain = labels.domain;
  row.mode = thinks ? "think" : "chat";
  if (thinks) row.effort = request.effort;
  row.source = labels.source;
  row.licence = labels.licence;
  row.ids = std::move(prompt.ids);
  // The header <Assistant><think> or <Assistant></think> belongs to the prompt; what follows was written by the
  // assistant, its closing marker included.
  TokenRole now = TokenRole::kPrompt;
  for (size_t t = 0; t < row.ids.size(); ++t) {
    const int32_t id = row.ids[t];
    const bool follows_header = t > 0 && row.ids[t - 1] == assistant && (id == open || id == close);
    row.role_mask.push_back(role(follows_header || id == assistant ? TokenRole::kPrompt : now));
    if (follows_header) now = id == open ? TokenRole::kReasoning : TokenRole::kAnswer;
    if (!follows_header && id == close && now == TokenRole::kReasoning) now = TokenRole::kAnswer;
    if (id == end) now = TokenRole::kPrompt;
  }
  return row;
}

ConversationMarkers conversation_markers(const Tokenizer& tokenizer) {
  return {tokenizer.id_of(kUser), tokenizer.id_of(kDsml)};
}

std::vector<DatasetRow> pick_rows(std::vector<DatasetRow> rows, int64_t n, uint64_t seed) {
  if (n <= 0 || n >= static_cast<int64_t>(rows.size())) return rows;
  std::vector<std::string> keys;
  for (const DatasetRow& row : rows) keys.push_back(sha256_hex(std::to_string(seed) + " " + row.id));
  std::vector<size_t> order(rows.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return keys[a] < keys[b]; });
  order.resize(static_cast<size_t>(n));
  std::sort(order.begin(), order.end());
  std::vector<DatasetRow> out;
  for (size_t i : order) out.push_back(std::move(rows[i]));
  return out;
}

}  // namespace espalier
