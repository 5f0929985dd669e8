// Data sets: sequences of token ids with a domain and a role per token. Calibration, sensitivity and panel sets are
// this type.
//
// On disk: JSON lines, one sequence a line (docs/formats/dataset.md). A file is read whole or refused with the line
// that is wrong; nothing is guessed or skipped. `sha256` names the file's bytes, `content_sha256` the canonical
// serialisation of ids, lengths and masks, which stays the same when the file is re-written.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace espalier {

// Who wrote a token: decides which positions a panel scores; every position contributes to calibration.
enum class TokenRole : uint8_t { kPrompt = 0, kReasoning = 1, kAnswer = 2, kRaw = 3 };

struct DatasetRow {
  std::string id;      // unique within the file
  std::string domain;  // non-empty
  std::string mode;    // raw, chat or think
  std::optional<int> effort;
  std::vector<int32_t> ids;        // at least one, each >= 0
  std::vector<uint8_t> role_mask;  // TokenRole per id, same length as ids
  std::string source;
  std::string licence;
};

struct Dataset {
  std::vector<DatasetRow> rows;
  std::string sha256;
  std::string content_sha256;

  int64_t n_tokens() const;
  // Domains in order of first appearance.
  std::vector<std::string> domains() const;
};

// `name` is used in messages. Errors: data_loss naming line and field for a broken line, an empty or blank line, a
// wrong type, an empty row, a mask of another length, a role above 3, an unknown mode or a repeated id; data_loss for a
// file without rows.
Result<Dataset> parse_dataset(std::string_view text, std::string_view name);

// Reads a file. Errors: not_found when missing, else as parse_dataset.
Result<Dataset> load_dataset(const std::filesystem::path& path);

// Errors: data_loss naming row and position when an id is >= vocab; or when a row is longer than max_tokens (0: no
// limit).
Status check_dataset_fits(const Dataset& dataset, int64_t vocab, int64_t max_tokens, std::string_view name);

// One line without the newline; parse_dataset of it gives the row back.
std::string dataset_line(const DatasetRow& row);
// Writes rows as a file, whole or not at all.
Status write_dataset(const std::filesystem::path& path, const std::vector<DatasetRow>& rows);

// sha256 over "espalier-dataset-1", the number of rows, and per row the number of tokens, the ids (int32 little endian)
// and the mask bytes. Independent of names and of JSON spelling.
std::string dataset_content_sha256(const std::vector<DatasetRow>& rows);

// At most n_rows rows (0: all), spread evenly over the file so that its composition is kept: row floor(i * size /
// n_rows).
std::vector<DatasetRow> spread_rows(const std::vector<DatasetRow>& rows, int64_t n_rows);

// Positions t whose next token (t + 1) was written by the assistant or is running text: role 1, 2 or 3. Ascending; the
// last position of a row is never scored. Source: quality specification 4.1.
std::vector<int32_t> scored_positions(const DatasetRow& row);

}  // namespace espalier
