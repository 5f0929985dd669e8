#include "ops/tier.h"

#include <atomic>

#include "ops/cpu/kernels.h"

namespace espalier::ops {
namespace {

bool runs_here(Tier tier) {
  switch (tier) {
    case Tier::kReference:
    case Tier::kBaseline:
      return true;
#if defined(__x86_64__)
    case Tier::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case Tier::kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
#else
    case Tier::kAvx2:
    case Tier::kAvx512:
      return false;
#endif
  }
  return false;
}

std::atomic<int>& active() {
  static std::atomic<int> tier{static_cast<int>(detected_tier())};
  return tier;
}

}  // namespace

Tier detected_tier() {
  static const Tier best = runs_here(Tier::kAvx512) ? Tier::kAvx512
                           : runs_here(Tier::kAvx2) ? Tier::kAvx2
                                                    : Tier::kBaseline;
  return best;
}

Tier active_tier() {
  return static_cast<Tier>(active().load(std::memory_order_relaxed));
}

bool set_simd_tier(Tier tier) {
  if (!runs_here(tier)) return false;
  active().store(static_cast<int>(tier), std::memory_order_relaxed);
  return true;
}

void reset_simd_tier() {
  active().store(static_cast<int>(detected_tier()), std::memory_order_relaxed);
}

std::vector<Tier> available_tiers() {
  std::vector<Tier> out;
  for (Tier t : {Tier::kBaseline, Tier::kAvx2, Tier::kAvx512}) {
    if (runs_here(t)) out.push_back(t);
  }
  return out;
}

std::string_view tier_name(Tier tier) {
  switch (tier) {
    case Tier::kReference:
      return "reference";
    case Tier::kBaseline:
      return "baseline";
    case Tier::kAvx2:
      return "avx2";
    case Tier::kAvx512:
      return "avx512";
  }
  return "unknown";
}

std::optional<Tier> tier_from_name(std::string_view name) {
  for (Tier t : {Tier::kReference, Tier::kBaseline, Tier::kAvx2, Tier::kAvx512}) {
    if (tier_name(t) == name) return t;
  }
  return std::nullopt;
}

const Kernels& kernels() {
#if defined(__x86_64__)
  switch (active_tier()) {
    case Tier::kAvx2:
      return *avx2_kernels();
    case Tier::kAvx512:
      return *avx512_kernels();
    default:
      break;
  }
#endif
  return *baseline_kernels();
}

}  // namespace espalier::ops
