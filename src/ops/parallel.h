// How operations cut rows among threads: chunks of at least about 20 microseconds, so that small calls stay on one
// thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>

#include "base/thread_pool.h"

namespace espalier::ops {

// body(begin, end) over [0, n). cost: rough nanoseconds per index. Every index belongs to exactly one call.
inline void for_rows(ThreadPool& pool, int64_t n, double cost_ns, const std::function<void(int64_t, int64_t)>& body) {
  if (n <= 0) return;
  const int64_t grain = std::max<int64_t>(1, static_cast<int64_t>(20000.0 / std::max(cost_ns, 1e-3)));
  if (n <= grain) {
    body(0, n);
    return;
  }
  pool.parallel_for(n, grain, body);
}

}  // namespace espalier::ops
