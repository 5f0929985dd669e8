// One thread that answers requests in the order they came, with a bounded queue in front of it.
//
// The HTTP side submits a Job and gets its text and outcome through callbacks on the worker's thread. Setting `cancelled` ends a
// running job within one token (one chunk during the prompt) and makes a waiting one end without running.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>

#include "base/status.h"
#include "runtime/generation.h"
#include "serve/api_error.h"

namespace espalier {

struct Job {
  GenerationRequest request;
  std::atomic<bool> cancelled{false};
  std::function<void()> on_start;  // the job left the queue
  DeltaSink on_delta;
  std::function<void(Result<Generation>)> on_done;  // exactly once per submitted job
};

class Worker {
 public:
  // `max_queue`: jobs that may wait beside the running one. The generator must outlive the worker.
  Worker(TextGenerator& generator, int max_queue);
  // Cancels everything, waits for the running job, joins.
  ~Worker();

  // Refuses (429 with an estimate of the wait) when the queue is full. Threads: any.
  std::optional<ApiError> submit(std::shared_ptr<Job> job);
  int n_waiting() const;
  // Cancels the running job and all waiting ones.
  void cancel_all();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace espalier
