#include "serve/worker.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <stdexcept>

#include "tests/unit/runtime/small_model.h"

namespace espalier {
namespace {

using namespace std::chrono_literals;

// A generator whose replies are under the test's control: it runs until told to end or cancelled.
class HeldGenerator : public TextGenerator {
 public:
  const Tokenizer& tokenizer() const override { return *golden_tokenizer(); }
  int64_t context() const override { return 100; }
  Result<Generation> generate(const GenerationRequest& request, const DeltaSink& on_delta, const CancelCheck& is_cancelled) override {
    order.push_back(request.prompt_ids.at(0));
    if (request.prompt_ids.at(0) == 666) throw std::runtime_error("boom");
    on_delta({.reasoning = "", .content = "x"});
    while (!release && !is_cancelled()) std::this_thread::sleep_for(1ms);
    Generation g;
    g.finish_reason = is_cancelled() ? FinishReason::kCancelled : FinishReason::kStop;
    return g;
  }

  std::atomic<bool> release{false};
  std::vector<int32_t> order;
};

struct Submitted {
  std::shared_ptr<Job> job = std::make_shared<Job>();
  std::future<void> started;
  std::future<Result<Generation>> done;
};

Submitted job_of(int32_t id) {
  Submitted s;
  s.job->request.prompt_ids = {id};
  auto started = std::make_shared<std::promise<void>>();
  auto done = std::make_shared<std::promise<Result<Generation>>>();
  s.started = started->get_future();
  s.done = done->get_future();
  s.job->on_start = [started] { started->set_value(); };
  s.job->on_delta = [](const ReplyDelta&) {};
  s.job->on_done = [done](Result<Generation> result) { done->set_value(std::move(result)); };
  return s;
}

TEST(Worker, answers_in_order_and_refuses_beyond_the_queue) {
  HeldGenerator generator;
  Worker worker(generator, 2);
  Submitted running = job_of(1);
  Submitted second = job_of(2);
  Submitted third = job_of(3);
  Submitted fourth = job_of(4);
  ASSERT_FALSE(worker.submit(running.job));
  running.started.wait();
  EXPECT_FALSE(worker.submit(second.job));
  EXPECT_FALSE(worker.submit(third.job));
  const auto refused = worker.submit(fourth.job);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->status, 429);
  EXPECT_GE(refused->retry_after_seconds, 1);
  EXPECT_EQ(worker.n_waiting(), 2);
  generator.release = true;
  EXPECT_TRUE(third.done.get().ok());
  EXPECT_EQ(generator.order, (std::vector<int32_t>{1, 2, 3}));
}

TEST(Worker, a_cancelled_waiting_job_frees_its_place_and_never_runs) {
  HeldGenerator generator;
  Worker worker(generator, 1);
  Submitted running = job_of(1);
  Submitted waiting = job_of(2);
  Submitted later = job_of(3);
  ASSERT_FALSE(worker.submit(running.job));
  running.started.wait();
  ASSERT_FALSE(worker.submit(waiting.job));
  waiting.job->cancelled = true;
  EXPECT_FALSE(worker.submit(later.job)) << "the cancelled job must not count";
  generator.release = true;
  EXPECT_EQ(waiting.done.get()->finish_reason, FinishReason::kCancelled);
  EXPECT_EQ(later.done.get()->finish_reason, FinishReason::kStop);
  EXPECT_EQ(generator.order, (std::vector<int32_t>{1, 3}));
}

TEST(Worker, a_queue_of_zero_still_runs_one) {
  HeldGenerator generator;
  Worker worker(generator, 0);
  Submitted running = job_of(1);
  ASSERT_FALSE(worker.submit(running.job));
  running.started.wait();
  EXPECT_TRUE(worker.submit(job_of(2).job));
  running.job->cancelled = true;
  EXPECT_EQ(running.done.get()->finish_reason, FinishReason::kCancelled);
}

TEST(Worker, an_exception_fails_one_request_only) {
  HeldGenerator generator;
  generator.release = true;
  Worker worker(generator, 4);
  Submitted bad = job_of(666);
  Submitted good = job_of(1);
  ASSERT_FALSE(worker.submit(bad.job));
  ASSERT_FALSE(worker.submit(good.job));
  const Result<Generation> failed = bad.done.get();
  ASSERT_FALSE(failed.ok());
  EXPECT_EQ(failed.error().code(), StatusCode::kInternal);
  EXPECT_TRUE(good.done.get().ok());
}

TEST(Worker, destruction_cancels_everything_and_finishes_every_job) {
  HeldGenerator generator;
  std::vector<Submitted> jobs;
  {
    Worker worker(generator, 8);
    for (int32_t i = 0; i < 5; ++i) {
      jobs.push_back(job_of(i));
      ASSERT_FALSE(worker.submit(jobs.back().job));
    }
    jobs[0].started.wait();
  }
  for (Submitted& s : jobs) EXPECT_EQ(s.done.get()->finish_reason, FinishReason::kCancelled);
}

}  // namespace
}  // namespace espalier
