#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <vector>

namespace espalier {
namespace {

TEST(ThreadPool, visits_every_index_exactly_once_for_any_number_of_threads_and_grain) {
  for (int threads : {1, 2, 3, 7}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.n_threads(), threads);
    for (int64_t n : {0, 1, 2, 17, 1000}) {
      for (int64_t grain : {1, 3, 1000}) {
        std::vector<std::atomic<int>> seen(static_cast<size_t>(n));
        pool.parallel_for(n, grain, [&](int64_t begin, int64_t end) {
          EXPECT_LE(end - begin, grain);
          for (int64_t i = begin; i < end; ++i) seen[static_cast<size_t>(i)]++;
        });
        for (auto& s : seen) EXPECT_EQ(s.load(), 1);
      }
    }
  }
}

TEST(ThreadPool, nested_loops_run_inline) {
  ThreadPool pool(3);
  std::atomic<int> count{0};
  pool.parallel_for(8, 1, [&](int64_t, int64_t) {
    pool.parallel_for(5, 1, [&](int64_t, int64_t) { count++; });
  });
  EXPECT_EQ(count.load(), 40);
}

TEST(ThreadPool, rethrows_what_the_body_threw_and_stays_usable) {
  ThreadPool pool(2);
  EXPECT_THROW(pool.parallel_for(100, 1,
                                 [](int64_t begin, int64_t) {
                                   if (begin == 50) throw std::runtime_error("boom");
                                 }),
               std::runtime_error);
  std::atomic<int> count{0};
  pool.parallel_for(10, 1, [&](int64_t, int64_t) { count++; });
  EXPECT_EQ(count.load(), 10);
}

}  // namespace
}  // namespace espalier
