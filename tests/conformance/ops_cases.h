// Every operation over every implementation with the same cases: all CPU tiers and thread counts must give equal bits,
// and agree with the plain-loop reference within a tolerance computed from sizes and operands.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "base/rng.h"
#include "base/simd_tier.h"
#include "base/thread_pool.h"

namespace espalier::ops {

// Values in [-scale, scale], the same for the same name.
inline std::vector<float> random_floats(const std::string& name, int64_t n, float scale = 1.0f) {
  const CounterRng rng(7, name);
  std::vector<float> out(static_cast<size_t>(n));
  for (size_t i = 0; i < out.size(); ++i) out[i] = scale * static_cast<float>(2.0 * rng.uniform(i) - 1.0);
  return out;
}

// run(pool) -> all outputs of the operation. Runs it on the reference and on every tier with 1 and 2 threads.
// tolerance(i) bounds |fast - reference| of output i.
inline void expect_conformance(const std::string& what, const std::function<std::vector<float>(ThreadPool&)>& run,
                               const std::function<double(size_t)>& tolerance) {
  ThreadPool one(1);
  ThreadPool two(2);
  ASSERT_TRUE(set_simd_tier(SimdTier::kReference));
  const std::vector<float> reference = run(one);
  std::vector<float> first;
  for (SimdTier tier : usable_simd_tiers()) {
    ASSERT_TRUE(set_simd_tier(tier));
    for (ThreadPool* pool : {&one, &two}) {
      const std::vector<float> out = run(*pool);
      ASSERT_EQ(out.size(), reference.size()) << what;
      if (first.empty()) {
        first = out;
        for (size_t i = 0; i < out.size(); ++i) {
          ASSERT_LE(std::fabs(static_cast<double>(out[i]) - static_cast<double>(reference[i])), tolerance(i))
              << what << " " << simd_tier_name(tier) << " against the reference, output " << i << ": " << out[i] << " and "
              << reference[i];
        }
      }
      for (size_t i = 0; i < out.size(); ++i) {
        ASSERT_EQ(std::memcmp(&out[i], &first[i], 4), 0)
            << what << " " << simd_tier_name(tier) << " with " << pool->n_threads() << " threads, output " << i << ": "
            << out[i] << ", baseline tier " << first[i];
      }
    }
  }
  reset_simd_tier();
}

inline constexpr double kEps = 0x1p-24;  // half an ulp of a float near 1

}  // namespace espalier::ops
