// Whether sequences share runs of n token ids with other sets: what keeps calibration and evaluation apart.
//
// Counted are all runs of a text row; of a conversation those that begin at or after its first user turn and hold no
// tool-call marker (the format's own text is the same everywhere). Runs are kept as 64-bit hashes: a shared run is never
// missed, a chance match is improbable and only leaves a row out. Source: quality.md 1.2; docs/pocket-data.md.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_set>
#include <vector>

#include "model/dataset.h"

namespace espalier {

struct ConversationMarkers {
  std::optional<int32_t> user;       // starts a user turn
  std::optional<int32_t> tool_call;  // stands in every tool-call marker
};

class NgramSet {
 public:
  explicit NgramSet(int64_t n, ConversationMarkers markers = {}) : n_(n), markers_(markers) {}
  void add(const DatasetRow& row);
  // Runs of the row, each place once, that are in the set.
  int64_t shared_with(const DatasetRow& row) const;
  size_t size() const { return seen_.size(); }

 private:
  std::vector<uint64_t> runs(const DatasetRow& row) const;

  int64_t n_;
  ConversationMarkers markers_;
  std::unordered_set<uint64_t> seen_;
};

}  // namespace espalier
