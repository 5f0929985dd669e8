#include "base/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "base/check.h"

#ifdef __linux__
#include <sched.h>
#endif

namespace espalier {
namespace {

thread_local bool t_inside_pool = false;

int usable_cpus() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace

struct ThreadPool::Impl {
  std::vector<std::thread> workers;
  std::mutex mutex;
  std::condition_variable wake;
  std::condition_variable done;
  uint64_t generation = 0;
  int busy = 0;
  bool stop = false;

  const std::function<void(int64_t, int64_t)>* body = nullptr;
  int64_t n = 0;
  int64_t grain = 1;
  std::atomic<int64_t> next{0};
  std::exception_ptr error;

  void drain() {
    t_inside_pool = true;
    try {
      for (;;) {
        const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
        if (begin >= n) break;
        (*body)(begin, std::min(begin + grain, n));
      }
    } catch (...) {
      next.store(n, std::memory_order_relaxed);
      std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
    }
    t_inside_pool = false;
  }

  void stop_all() {
    {
      std::lock_guard lock(mutex);
      stop = true;
    }
    wake.notify_all();
    for (auto& w : workers) w.join();
    workers.clear();
  }

  void work() {
    uint64_t seen = 0;
    for (;;) {
      {
        std::unique_lock lock(mutex);
        wake.wait(lock, [&] { return stop || generation != seen; });
        if (stop) return;
        seen = generation;
      }
      drain();
      std::lock_guard lock(mutex);
      if (--busy == 0) done.notify_one();
    }
  }
};

ThreadPool::ThreadPool(int n_threads) : impl_(std::make_unique<Impl>()) {
  CHECK(n_threads >= 0);
  const int n = n_threads == 0 ? usable_cpus() : n_threads;
  try {
    for (int i = 1; i < n; ++i) impl_->workers.emplace_back([this] { impl_->work(); });
  } catch (...) {  // the threads that did start must end before the members that they wait on go away
    impl_->stop_all();
    throw;
  }
}

ThreadPool::~ThreadPool() { impl_->stop_all(); }

int ThreadPool::n_threads() const { return static_cast<int>(impl_->workers.size()) + 1; }

void ThreadPool::parallel_for(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  CHECK(grain >= 1);
  if (n <= 0) return;
  if (t_inside_pool || impl_->workers.empty() || n <= grain) {
    for (int64_t begin = 0; begin < n; begin += grain) body(begin, std::min(begin + grain, n));
    return;
  }
  {
    std::lock_guard lock(impl_->mutex);
    impl_->body = &body;
    impl_->n = n;
    impl_->grain = grain;
    impl_->next.store(0, std::memory_order_relaxed);
    impl_->busy = static_cast<int>(impl_->workers.size());
    impl_->error = nullptr;
    ++impl_->generation;
  }
  impl_->wake.notify_all();
  impl_->drain();
  std::unique_lock lock(impl_->mutex);
  impl_->done.wait(lock, [&] { return impl_->busy == 0; });
  impl_->body = nullptr;
  if (impl_->error) std::rethrow_exception(impl_->error);
}

}  // namespace espalier
