#include "serve/worker.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

namespace espalier {

struct Worker::Impl {
  TextGenerator& generator;
  const int max_queue;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Job>> waiting;
  std::shared_ptr<Job> running;
  double mean_seconds = 1.0;  // of finished jobs, exponentially weighted
  bool stopping = false;
  std::thread thread;

  Impl(TextGenerator& g, int n) : generator(g), max_queue(n) {}

  void loop() {
    for (;;) {
      std::shared_ptr<Job> job;
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [this] { return stopping || !waiting.empty(); });
        if (waiting.empty()) return;
        job = std::move(waiting.front());
        waiting.pop_front();
        running = job;
      }
      const auto start = std::chrono::steady_clock::now();
      if (job->on_start) job->on_start();
      Result<Generation> outcome = answer(*job);
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      {
        std::lock_guard lock(mutex);
        running = nullptr;
        if (!job->cancelled) mean_seconds += 0.2 * (seconds - mean_seconds);
      }
      job->on_done(std::move(outcome));
    }
  }

  // Jobs that were cancelled while waiting leave when their turn comes, but do not count. Call with the mutex held.
  int count_waiting() const {
    return static_cast<int>(std::count_if(waiting.begin(), waiting.end(), [](const auto& job) { return !job->cancelled; }));
  }

  // Exceptions (out of memory, third-party) end here: one request's failure must not take the server down.
  Result<Generation> answer(Job& job) {
    if (job.cancelled) return Generation{.finish_reason = FinishReason::kCancelled};
    try {
      return generator.generate(job.request, job.on_delta, [&job] { return job.cancelled.load(std::memory_order_relaxed); });
    } catch (const std::bad_alloc&) {
      return resource_exhausted("out of memory while answering; use a shorter prompt or a smaller --context");
    } catch (const std::exception& e) {
      return internal_error(std::string("unexpected exception while answering: ") + e.what());
    }
  }
};

Worker::Worker(TextGenerator& generator, int max_queue) : impl_(std::make_unique<Impl>(generator, max_queue)) {
  impl_->thread = std::thread([impl = impl_.get()] { impl->loop(); });
}

Worker::~Worker() {
  cancel_all();
  {
    std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->changed.notify_all();
  impl_->thread.join();
}

std::optional<ApiError> Worker::submit(std::shared_ptr<Job> job) {
  {
    std::lock_guard lock(impl_->mutex);
    if (impl_->stopping) return shutting_down();
    const int n_waiting = impl_->count_waiting();
    const bool busy = impl_->running != nullptr || n_waiting > 0;
    if (busy && n_waiting >= impl_->max_queue) {
      const double wait = impl_->mean_seconds * (n_waiting + 1);
      return queue_full(impl_->max_queue, static_cast<int>(std::clamp(std::ceil(wait), 1.0, 600.0)));
    }
    impl_->waiting.push_back(std::move(job));
  }
  impl_->changed.notify_one();
  return std::nullopt;
}

int Worker::n_waiting() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->count_waiting();
}

void Worker::cancel_all() {
  std::lock_guard lock(impl_->mutex);
  for (const auto& job : impl_->waiting) job->cancelled = true;
  if (impl_->running) impl_->running->cancelled = true;
}

}  // namespace espalier
