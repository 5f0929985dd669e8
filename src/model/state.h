// Everything a sequence carries from one call to the next: window rings, compressed KV, index keys, open groups and the
// Engram history. Weights are shared; a state belongs to one sequence and one thread at a time.
//
// Rings and open groups keep kRewindRows extra rows, so the last kRewindRows tokens can be taken back (rejected drafts)
// by truncate() without saving anything beforehand. Writing the same positions again gives the same contents, so a
// layer may be run twice over one call when the call starts at position 0 (capture with native weights, then advance
// with quantized ones). Source: model.md sections 5.2, 5.3, 5.7, 8.2.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "model/config.h"

namespace espalier {

// Window keys of one layer (or drafter stage), already normalised, rotated and quantised as the numerics ask.
struct WindowRing {
  int64_t head_dim = 0;
  int64_t n_slots = 0;      // window + kRewindRows; slot = position mod n_slots
  std::vector<float> rows;  // [n_slots, head_dim]

  float* row(int64_t position) { return rows.data() + position % n_slots * head_dim; }
  const float* row(int64_t position) const { return rows.data() + position % n_slots * head_dim; }
};

// Compressed entries of one kv source. Entry j covers positions j*ratio .. j*ratio + ratio - 1.
struct CompressedCache {
  std::vector<float> kv;  // [n_entries, head_dim], rotated
  std::vector<float>
      index_keys;  // panels [ceil(n_entries/32)][index_head_dim][32]: entry j is lane j mod 32 of panel j/32
  std::vector<float>
      group_kv;  // [n_group_slots, head_dim] projections of recent tokens; slot = position mod n_group_slots
  std::vector<float> group_gate;  // the same; both empty at ratio 1
  int64_t n_group_slots = 0;
};

// How far a sequence is, and how far it may go back.
class SequencePosition {
 public:
  static constexpr int64_t kRewindRows = 16;

  int64_t n_tokens() const { return n_tokens_; }
  // At most kRewindRows below the highest position reached since the last reset (invalid_argument otherwise); 0 equals reset().
  Status truncate(int64_t n_tokens);
  void advance(int64_t n);
  void reset();

 private:
  int64_t n_tokens_ = 0;
  int64_t high_water_ = 0;
};

class SequenceState {
 public:
  static constexpr int64_t kRewindRows = SequencePosition::kRewindRows;

  explicit SequenceState(const Config& config);

  // Tokens processed so far; the next call starts at this position.
  int64_t n_tokens() const { return position_.n_tokens(); }
  // Forgets tokens from `n_tokens` on. At most kRewindRows below the highest position reached since the last reset can
  // be taken back (invalid_argument otherwise); 0 is always allowed and equals reset().
  Status truncate(int64_t n_tokens);
  void reset();

  // --- for the forward pass ---
  std::vector<WindowRing> windows;          // [n_layers]
  std::vector<CompressedCache> compressed;  // [n_layers]; only kv sources are used
  std::vector<int32_t> engram_history;      // compressed id per position; empty without Engram
  void advance(int64_t n);                  // after a call of n tokens went through every layer
  // Bytes held now.
  int64_t size_bytes() const;

 private:
  SequencePosition position_;
};

}  // namespace espalier
