// Which instruction set the inner loops use. All CPU tiers give the same bits; a lower one is slower, never different. kReference is
// plain loops that define the answer: the codec's equal the other tiers, those of ops/reference use double accumulators and agree
// within rounding.
//
// The active tier is process-wide: the best one of this machine, until a test, a bench or a bug report pins another.
// Threads: reading is safe; set and reset not while operations are running.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace espalier {

// kBaseline is what every machine of the architecture has: SSE4 (x86-64-v2) or NEON. The others are x86 only, chosen at run time.
enum class SimdTier : uint8_t { kReference, kBaseline, kAvx2, kAvx512 };

// The fastest tier that this machine can run. Detected once.
SimdTier best_simd_tier();
// The tier in use, and what functions with a tier argument take by default.
SimdTier active_simd_tier();
// Returns false (and changes nothing) when the machine cannot run `tier`.
bool set_simd_tier(SimdTier tier);
// Back to best_simd_tier().
void reset_simd_tier();
// All tiers that this machine can run, slowest first, without the reference.
std::vector<SimdTier> usable_simd_tiers();
// "reference", "baseline", "avx2", "avx512".
std::string_view simd_tier_name(SimdTier tier);
std::optional<SimdTier> simd_tier_from_name(std::string_view name);

}  // namespace espalier
