#include "base/simd_tier.h"

#include <gtest/gtest.h>

namespace espalier {
namespace {

constexpr SimdTier kAll[] = {SimdTier::kReference, SimdTier::kBaseline, SimdTier::kAvx2, SimdTier::kAvx512};

TEST(SimdTier, names_round_trip_and_others_are_absent) {
  for (SimdTier t : kAll) EXPECT_EQ(simd_tier_from_name(simd_tier_name(t)), t);
  EXPECT_FALSE(simd_tier_from_name("avx1024").has_value());
  EXPECT_FALSE(simd_tier_from_name("").has_value());
}

TEST(SimdTier, the_best_tier_is_active_and_the_last_usable_one) {
  EXPECT_EQ(usable_simd_tiers().front(), SimdTier::kBaseline);
  EXPECT_EQ(usable_simd_tiers().back(), best_simd_tier());
  EXPECT_EQ(active_simd_tier(), best_simd_tier());
}

TEST(SimdTier, exactly_the_tiers_of_this_machine_can_be_set) {
  for (SimdTier t : kAll) {
    EXPECT_EQ(set_simd_tier(t), t <= best_simd_tier()) << simd_tier_name(t);
    if (t <= best_simd_tier()) {
      EXPECT_EQ(active_simd_tier(), t);
    }
  }
  reset_simd_tier();
  EXPECT_EQ(active_simd_tier(), best_simd_tier());
}

}  // namespace
}  // namespace espalier
