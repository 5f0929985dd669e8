#include "base/simd_tier.h"

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace espalier {
namespace {

constexpr SimdTier kTiers[] = {SimdTier::kReference, SimdTier::kBaseline, SimdTier::kAvx2, SimdTier::kAvx512};

#if defined(__x86_64__)
bool has_f16c() {  // clang 14 does not know this name in __builtin_cpu_supports
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

// The lists of the compiler flags of *_avx2.cpp and *_avx512.cpp.
SimdTier detect() {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
  return avx512 ? SimdTier::kAvx512 : avx2 ? SimdTier::kAvx2 : SimdTier::kBaseline;
}
#else
SimdTier detect() { return SimdTier::kBaseline; }
#endif

std::atomic<SimdTier>& active() {
  static std::atomic<SimdTier> tier{best_simd_tier()};
  return tier;
}

}  // namespace

SimdTier best_simd_tier() {
  static const SimdTier tier = detect();
  return tier;
}

SimdTier active_simd_tier() { return active().load(std::memory_order_relaxed); }

bool set_simd_tier(SimdTier tier) {
  if (tier > best_simd_tier()) return false;
  active().store(tier, std::memory_order_relaxed);
  return true;
}

void reset_simd_tier() { active().store(best_simd_tier(), std::memory_order_relaxed); }

std::vector<SimdTier> usable_simd_tiers() {
  std::vector<SimdTier> tiers;
  for (SimdTier t : kTiers) {
    if (t != SimdTier::kReference && t <= best_simd_tier()) tiers.push_back(t);
  }
  return tiers;
}

std::string_view simd_tier_name(SimdTier tier) {
  switch (tier) {
    case SimdTier::kReference: return "reference";
    case SimdTier::kBaseline: return "baseline";
    case SimdTier::kAvx2: return "avx2";
    case SimdTier::kAvx512: return "avx512";
  }
  return "unknown";
}

std::optional<SimdTier> simd_tier_from_name(std::string_view name) {
  for (SimdTier t : kTiers) {
    if (simd_tier_name(t) == name) return t;
  }
  return std::nullopt;
}

}  // namespace espalier
