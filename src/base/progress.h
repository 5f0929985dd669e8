// Progress of long work, reported by stages and shown by programs (bar with rate and ETA on a terminal, plain lines when
// piped). A stage calls begin once per phase, then advance; it asks is_cancelled between units of work and stops cleanly.
// Threads: advance and is_cancelled may be called from any thread.
#pragma once

#include <cstdint>
#include <string_view>

namespace espalier {

class Progress {
 public:
  virtual ~Progress() = default;
  virtual void begin(std::string_view phase, int64_t total_units) = 0;
  virtual void advance(int64_t units, std::string_view detail = {}) = 0;
  virtual bool is_cancelled() const { return false; }
};

// Reports nothing; for tests and callers that do not care.
class SilentProgress : public Progress {
 public:
  void begin(std::string_view, int64_t) override {}
  void advance(int64_t, std::string_view) override {}
};

}  // namespace espalier
