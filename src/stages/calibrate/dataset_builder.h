// From texts and conversations to the rows of a data set: token ids and who wrote each token.
//
// A text becomes rows of at most `length` tokens, each starting with the begin marker: consecutive stretches, a last one
// of less than half the length is left out unless it is the only one. A conversation becomes one row; its assistant's
// tokens are told apart by the markers of the encoding, which a message cannot forge. Source: quality.md 1.2;
// docs/formats/dataset.md.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model/dataset.h"
#include "stages/calibrate/ngram_overlap.h"
#include "text/chat.h"
#include "text/tokenizer.h"

namespace espalier {

// The part of all documents that a set takes: those with hash(document) mod `of` in [first, last].
struct DocumentPart {
  int64_t first = 0, last = 0, of = 1;
};
// sha256 of the name decides; independent of order and of other documents.
bool is_in_part(const DocumentPart& part, std::string_view document);

struct RowLabels {
  std::string domain, source, licence;
};

// Errors: failed_precondition when the tokenizer lacks the begin marker; those of the tokenizer.
Result<std::vector<DatasetRow>> rows_of_text(const Tokenizer& tokenizer, const std::string& document,
                                             std::string_view text, int64_t length, const RowLabels& labels);

// thinks: render reasoning (mode "think"), else mode "chat". Errors: invalid_argument for images; those of render_chat.
Result<DatasetRow> row_of_chat(const Tokenizer& tokenizer, const std::string& name, ChatRequest request, bool thinks,
                               const RowLabels& labels);

ConversationMarkers conversation_markers(const Tokenizer& tokenizer);

// Picks at most n rows (0: all) by hash(seed, row id), in their given order.
std::vector<DatasetRow> pick_rows(std::vector<DatasetRow> rows, int64_t n, uint64_t seed);

}  // namespace espalier
