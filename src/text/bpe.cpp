#include "text/bpe.h"

#include <bit>
#include <limits>
#include <queue>

#include "base/check.h"

namespace espalier {
namespace {

constexpr size_t kShortPiece = 24;  // bytes; the scan is faster than the heap below about this size

uint64_t pair_key(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

uint64_t mix(uint64_t key) {
  return (key ^ key >> 29) * 0x9E3779B97F4A7C15u;
}

}  // namespace

BytePairMerger::BytePairMerger(const std::array<int32_t, 256>& byte_ids, const std::vector<Merge>& merges)
    : byte_ids_(byte_ids) {
  const size_t size = std::bit_ceil(merges.size() * 2 + 2);
  slots_.resize(size);
  shift_ = 64u - static_cast<uint32_t>(std::countr_zero(size));
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const uint64_t key = pair_key(merges[rank].left, merges[rank].right);
    size_t i = mix(key) >> shift_;
    while (slots_[i].pair != kEmpty) {
      CHECK(slots_[i].pair != key) << "a pair is merged twice";
      i = (i + 1) & (size - 1);
    }
    slots_[i] = {key, static_cast<uint32_t>(rank), merges[rank].result};
  }
}

const BytePairMerger::Slot* BytePairMerger::find(int32_t left, int32_t right) const {
  const uint64_t key = pair_key(left, right);
  for (size_t i = mix(key) >> shift_;; i = (i + 1) & (slots_.size() - 1)) {
    if (slots_[i].pair == key) return &slots_[i];
    if (slots_[i].pair == kEmpty) return nullptr;
  }
}

void BytePairMerger::merge(std::string_view piece, std::vector<int32_t>& out) const {
  if (piece.size() <= kShortPiece) {
    merge_short(piece, out);
  } else {
    merge_long(piece, out);
  }
}

void BytePairMerger::merge_short(std::string_view piece, std::vector<int32_t>& out) const {
  int32_t ids[kShortPiece];
  const Slot* pairs[kShortPiece];  // pairs[i]: the merge of ids[i] and ids[i + 1], or null
  size_t n = piece.size();
  for (size_t i = 0; i < n; ++i) ids[i] = byte_ids_[static_cast<uint8_t>(piece[i])];
  for (size_t i = 0; i + 1 < n; ++i) pairs[i] = find(ids[i], ids[i + 1]);
  while (n > 1) {
    size_t best = n;
    for (size_t i = 0; i + 1 < n; ++i) {
      if (pairs[i] != nullptr && (best == n || pairs[i]->rank < pairs[best]->rank)) best = i;
    }
    if (best == n) break;
    ids[best] = pairs[best]->result;
    for (size_t i = best + 1; i + 1 < n; ++i) {
      ids[i] = ids[i + 1];
      pairs[i] = pairs[i + 1];
    }
    --n;
    if (best + 1 < n) pairs[best] = find(ids[best], ids[best + 1]);
    if (best > 0) pairs[best - 1] = find(ids[best - 1], ids[best]);
  }
  out.insert(out.end(), ids, ids + n);
}

void BytePairMerger::merge_long(std::string_view piece, std::vector<int32_t>& out) const {
  constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();
  CHECK(piece.size() < kNone);
  struct Symbol {
    int32_t id;  // -1: merged into an earlier one
    uint32_t previous;
    uint32_t next;
  };
  struct Candidate {
    uint32_t rank;
    uint32_t at;
    int32_t result;
    bool operator<(const Candidate& other) const {  // the top of the queue is the smallest (rank, at)
      return rank != other.rank ? rank > other.rank : at > other.at;
    }
  };
  const uint32_t n = static_cast<uint32_t>(piece.size());
  std::vector<Symbol> symbols(n);
  for (uint32_t i = 0; i < n; ++i) {
    symbols[i] = {byte_ids_[static_cast<uint8_t>(piece[i])], i == 0 ? kNone : i - 1, i + 1 == n ? kNone : i + 1};
  }
  std::vector<Candidate> candidates;
  candidates.reserve(n);
  for (uint32_t i = 0; i + 1 < n; ++i) {
    if (const Slot* slot = find(symbols[i].id, symbols[i + 1].id)) candidates.push_back({slot->rank, i, slot->result});
  }
  std::priority_queue<Candidate> queue(std::less<Candidate>(), std::move(candidates));
  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    Symbol& symbol = symbols[top.at];
    if (symbol.id < 0 || symbol.next == kNone) continue;
    Symbol& right = symbols[symbol.next];
    const Slot* slot = find(symbol.id, right.id);
    if (slot == nullptr || slot->result != top.result) continue;  // one of the two has been merged since
    symbol.id = slot->result;
    right.id = -1;
    symbol.next = right.next;
    if (symbol.next != kNone) {
      symbols[symbol.next].previous = top.at;
      if (const Slot* s = find(symbol.id, symbols[symbol.next].id)) queue.push({s->rank, top.at, s->result});
    }
    if (symbol.previous != kNone) {
      if (const Slot* s = find(symbols[symbol.previous].id, symbol.id))
        queue.push({s->rank, symbol.previous, s->result});
    }
  }
  for (uint32_t i = 0; i != kNone; i = symbols[i].next) out.push_back(symbols[i].id);
}

}  // namespace espalier
