#include "model/state.h"

#include <algorithm>

#include "ops/cpu/kernels.h"  // kPanelWidth

namespace espalier {

SequenceState::SequenceState(const Config& config) {
  windows.resize(static_cast<size_t>(config.n_layers));
  compressed.resize(static_cast<size_t>(config.n_layers));
  for (int l = 0; l < config.n_layers; ++l) {
    WindowRing& w = windows[static_cast<size_t>(l)];
    w.head_dim = config.head_dim;
    w.n_slots = config.window + kRewindRows;
    w.rows.assign(static_cast<size_t>(w.n_slots * w.head_dim), 0.0f);
    const int64_t m = config.ratio(l);
    if (!config.is_kv_source(l) || m <= 1) continue;
    CompressedCache& c = compressed[static_cast<size_t>(l)];
    c.n_group_slots = (m + kRewindRows + m - 1) / m * m;
    c.group_kv.assign(static_cast<size_t>(c.n_group_slots * config.head_dim), 0.0f);
    c.group_gate.assign(static_cast<size_t>(c.n_group_slots * config.head_dim), 0.0f);
  }
}

Status SequencePosition::truncate(int64_t n_tokens) {
  if (n_tokens == 0) {
    reset();
    return ok_status();
  }
  if (n_tokens < 0 || n_tokens > n_tokens_ || n_tokens < high_water_ - kRewindRows) {
    return invalid_argument("sequence state: cannot go back to " + std::to_string(n_tokens) + " tokens from " +
                            std::to_string(n_tokens_) + " (highest " + std::to_string(high_water_) + "); at most " +
                            std::to_string(kRewindRows) + " tokens can be taken back");
  }
  n_tokens_ = n_tokens;
  return ok_status();
}

void SequencePosition::reset() {
  n_tokens_ = 0;
  high_water_ = 0;
}

void SequencePosition::advance(int64_t n) {
  n_tokens_ += n;
  high_water_ = std::max(high_water_, n_tokens_);
}

Status SequenceState::truncate(int64_t n_tokens) {
  if (n_tokens == 0) {
    reset();
    return ok_status();
  }
  RETURN_IF_ERROR(position_.truncate(n_tokens));
  if (!engram_history.empty()) engram_history.resize(static_cast<size_t>(n_tokens));
  return ok_status();  // caches keep rows beyond; they are overwritten before they can be seen
}

void SequenceState::reset() {
  position_.reset();
  engram_history.clear();
}

void SequenceState::advance(int64_t n) {
  position_.advance(n);
}

int64_t SequenceState::size_bytes() const {
  size_t floats = 0;
  for (const WindowRing& w : windows) floats += w.rows.size();
  for (const CompressedCache& c : compressed)
    floats += c.kv.size() + c.index_keys.size() + c.group_kv.size() + c.group_gate.size();
  return static_cast<int64_t>(4 * floats + 4 * engram_history.size());
}

}  // namespace espalier
