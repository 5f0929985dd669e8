#include "model/dataset.h"

#include <nlohmann/json.hpp>
#include <set>

#include "base/file.h"
#include "base/hash.h"
#include "format/json.h"

namespace espalier {
namespace {

constexpr int64_t kMaxRowTokens = int64_t{1} << 24;

Status bad(const std::string& where, const std::string& what) {
  return data_loss(where + ": " + what + "; a data set line is {id, domain, mode, ids, role_mask, source, licence}");
}

Result<std::string> text_field(const Json& line, const char* key, const std::string& where, bool may_be_empty) {
  const auto it = line.find(key);
  if (it == line.end()) return bad(where, std::string("field '") + key + "' is missing");
  if (!it->is_string())
    return bad(where, std::string("field '") + key + "': expected a string, found " + it->type_name());
  std::string value = it->get<std::string>();
  if (value.empty() && !may_be_empty) return bad(where, std::string("field '") + key + "' is empty");
  return value;
}

// An array of integers in [0, limit].
Result<std::vector<int64_t>> integers(const Json& line, const char* key, int64_t limit, const std::string& where) {
  const auto it = line.find(key);
  if (it == line.end()) return bad(where, std::string("field '") + key + "' is missing");
  if (!it->is_array())
    return bad(where, std::string("field '") + key + "': expected an array, found " + it->type_name());
  if (static_cast<int64_t>(it->size()) > kMaxRowTokens) {
    return bad(where, std::string("field '") + key + "' has " + std::to_string(it->size()) + " entries; the limit is " +
                          std::to_string(kMaxRowTokens));
  }
  std::vector<int64_t> out;
  out.reserve(it->size());
  for (const Json& entry : *it) {
    const bool fits = entry.is_number_unsigned() && entry.get<uint64_t>() <= static_cast<uint64_t>(limit);
    if (!fits) {
      return bad(where, std::string("field '") + key + "', entry " + std::to_string(out.size()) +
                            ": expected an integer in 0.." + std::to_string(limit) + ", found " +
                            dump_json(entry).substr(0, 40));
    }
    out.push_back(entry.get<int64_t>());
  }
  return out;
}

Result<DatasetRow> parse_row(std::string_view text, const std::string& where) {
  ASSIGN_OR_RETURN(Json line, parse_json(text, where));
  if (!line.is_object()) return bad(where, std::string("expected a JSON object, found ") + line.type_name());
  DatasetRow row;
  ASSIGN_OR_RETURN(row.id, text_field(line, "id", where, false));
  ASSIGN_OR_RETURN(row.domain, text_field(line, "domain", where, false));
  ASSIGN_OR_RETURN(row.mode, text_field(line, "mode", where, false));
  if (row.mode != "raw" && row.mode != "chat" && row.mode != "think") {
    return bad(where, "field 'mode': expected raw, chat or think, found '" + row.mode + "'");
  }
  if (const auto it = line.find("effort"); it != line.end() && !it->is_null()) {
    if (!it->is_number_unsigned() || it->get<uint64_t>() > 1000) {
      return bad(where, "field 'effort': expected an integer in 0..1000, found " + dump_json(*it).substr(0, 40));
    }
    row.effort = it->get<int>();
  }
  ASSIGN_OR_RETURN(row.source, text_field(line, "source", where, true));
  ASSIGN_OR_RETURN(row.licence, text_field(line, "licence", where, true));
  ASSIGN_OR_RETURN(const std::vector<int64_t> ids, integers(line, "ids", INT32_MAX, where));
  ASSIGN_OR_RETURN(const std::vector<int64_t> mask, integers(line, "role_mask", 3, where));
  if (ids.empty()) return bad(where, "row '" + row.id + "' is empty: field 'ids' has no entries");
  if (ids.size() != mask.size()) {
    return bad(where, "row '" + row.id + "': field 'role_mask' has " + std::to_string(mask.size()) +
                          " entries, 'ids' has " + std::to_string(ids.size()));
  }
  row.ids.assign(ids.begin(), ids.end());
  row.role_mask.assign(mask.begin(), mask.end());
  return row;
}

void update_le(Sha256& hash, uint64_t value, int n_bytes) {
  uint8_t bytes[8];
  for (int i = 0; i < n_bytes; ++i) bytes[i] = static_cast<uint8_t>(value >> (8 * i));
  hash.update(std::span<const uint8_t>(bytes, static_cast<size_t>(n_bytes)));
}

}  // namespace

int64_t Dataset::n_tokens() const {
  int64_t n = 0;
  for (const DatasetRow& row : rows) n += static_cast<int64_t>(row.ids.size());
  return n;
}

std::vector<std::string> Dataset::domains() const {
  std::vector<std::string> out;
  std::set<std::string> seen;
  for (const DatasetRow& row : rows) {
    if (seen.insert(row.domain).second) out.push_back(row.domain);
  }
  return out;
}

Result<Dataset> parse_dataset(std::string_view text, std::string_view name) {
  Dataset dataset;
  dataset.sha256 = sha256_hex(text);
  std::set<std::string> seen;
  int64_t line_number = 0;
  while (!text.empty()) {
    ++line_number;
    const std::string where = "data set '" + std::string(name) + "' line " + std::to_string(line_number);
    const size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    if (line.find_first_not_of(" \t") == std::string_view::npos) return bad(where, "the line is blank");
    ASSIGN_OR_RETURN(DatasetRow row, parse_row(line, where));
    if (!seen.insert(row.id).second) return bad(where, "id '" + row.id + "' occurs twice");
    dataset.rows.push_back(std::move(row));
  }
  if (dataset.rows.empty()) return data_loss("data set '" + std::string(name) + "' has no rows");
  dataset.content_sha256 = dataset_content_sha256(dataset.rows);
  return dataset;
}

Result<Dataset> load_dataset(const std::filesystem::path& path) {
  ASSIGN_OR_RETURN(const std::string text, read_text_file(path, uint64_t{1} << 34));
  return parse_dataset(text, path.filename().string());
}

Status check_dataset_fits(const Dataset& dataset, int64_t vocab, int64_t max_tokens, std::string_view name) {
  for (const DatasetRow& row : dataset.rows) {
    const std::string where = "data set '" + std::string(name) + "' row '" + row.id + "'";
    if (max_tokens > 0 && static_cast<int64_t>(row.ids.size()) > max_tokens) {
      return data_loss(where + " has " + std::to_string(row.ids.size()) + " tokens; the model's context is " +
                       std::to_string(max_tokens));
    }
    for (size_t i = 0; i < row.ids.size(); ++i) {
      if (row.ids[i] >= vocab) {
        return data_loss(where + ": id " + std::to_string(row.ids[i]) + " at position " + std::to_string(i) +
                         " is not below the model's vocabulary of " + std::to_string(vocab) +
                         "; was the data set made with another tokenizer?");
      }
    }
  }
  return ok_status();
}

std::string dataset_line(const DatasetRow& row) {
  Json line;
  line["id"] = row.id;
  line["domain"] = row.domain;
  line["mode"] = row.mode;
  if (row.effort.has_value()) line["effort"] = *row.effort;
  line["ids"] = row.ids;
  line["role_mask"] = std::vector<int>(row.role_mask.begin(), row.role_mask.end());
  line["source"] = row.source;
  line["licence"] = row.licence;
  return dump_json(line);
}

Status write_dataset(const std::filesystem::path& path, const std::vector<DatasetRow>& rows) {
  ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::create(path));
  for (const DatasetRow& row : rows) RETURN_IF_ERROR(file.write(dataset_line(row) + "\n"));
  return file.commit();
}

std::string dataset_content_sha256(const std::vector<DatasetRow>& rows) {
  Sha256 hash;
  hash.update(std::string_view("espalier-dataset-1"));
  update_le(hash, rows.size(), 8);
  for (const DatasetRow& row : rows) {
    update_le(hash, row.ids.size(), 8);
    for (int32_t id : row.ids) update_le(hash, static_cast<uint32_t>(id), 4);
    hash.update(std::span<const uint8_t>(row.role_mask));
  }
  return hash.finish_hex();
}

std::vector<DatasetRow> spread_rows(const std::vector<DatasetRow>& rows, int64_t n_rows) {
  const auto size = static_cast<int64_t>(rows.size());
  if (n_rows <= 0 || n_rows >= size) return rows;
  std::vector<DatasetRow> out;
  for (int64_t i = 0; i < n_rows; ++i) out.push_back(rows[static_cast<size_t>(i * size / n_rows)]);
  return out;
}

std::vector<int32_t> scored_positions(const DatasetRow& row) {
  std::vector<int32_t> out;
  for (size_t t = 0; t + 1 < row.ids.size(); ++t) {
    if (row.role_mask[t + 1] != static_cast<uint8_t>(TokenRole::kPrompt)) out.push_back(static_cast<int32_t>(t));
  }
  return out;
}

}  // namespace espalier
