#include "codec/simd_tier.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace espalier::codec {
namespace {

#if defined(__x86_64__)
bool has_f16c() {  // clang 14 does not know this name in __builtin_cpu_supports
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

SimdTier detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  // The same list as the compiler flags of *_avx512.cpp.
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
  if (avx512) return SimdTier::kAvx512;
  if (avx2) return SimdTier::kAvx2;
  return SimdTier::kSse4;
#else
  return SimdTier::kPortable;
#endif
}

}  // namespace

SimdTier best_simd_tier() {
  static const SimdTier tier = detect();
  return tier;
}

std::vector<SimdTier> usable_simd_tiers() {
  std::vector<SimdTier> tiers;
  for (int t = 0; t <= static_cast<int>(best_simd_tier()); ++t) tiers.push_back(static_cast<SimdTier>(t));
  return tiers;
}

std::string_view simd_tier_name(SimdTier tier) {
  switch (tier) {
    case SimdTier::kPortable: return "portable";
    case SimdTier::kSse4: return "sse4";
    case SimdTier::kAvx2: return "avx2";
    case SimdTier::kAvx512: return "avx512";
  }
  return "unknown";
}

}  // namespace espalier::codec
