// A pool of threads for data-parallel loops.
//
// parallel_for cuts [0, n) into fixed chunks and lets threads take them in any order; callers keep results independent of
// the number of threads by giving every output element to exactly one chunk and reducing in a fixed order themselves.
// Threads: parallel_for may be called from one thread at a time per pool; nested calls run inline on the calling thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace espalier {

class ThreadPool {
 public:
  // n_threads >= 1 counts the calling thread; 0 means the number of usable CPUs. Throws std::system_error when the system
  // cannot start that many.
  explicit ThreadPool(int n_threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int n_threads() const;

  // Calls body(begin, end) for consecutive chunks of at most `grain` indices until [0, n) is covered; returns when all are
  // done. An exception thrown by body is rethrown here after the loop has drained.
  void parallel_for(int64_t n, int64_t grain, const std::function<void(int64_t begin, int64_t end)>& body);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace espalier
