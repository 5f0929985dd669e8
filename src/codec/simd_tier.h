// Which instruction set the codec's inner loops use. All tiers give the same bits; a lower one is slower, never different.
// kPortable is plain C++ (the reference), kSse4 is the x86-64-v2 baseline, the others are chosen at run time.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace espalier::codec {

enum class SimdTier : uint8_t { kPortable, kSse4, kAvx2, kAvx512 };

// The fastest tier that this machine can run. Detected once.
SimdTier best_simd_tier();
// All tiers that this machine can run, slowest first.
std::vector<SimdTier> usable_simd_tiers();
// "portable", "sse4", "avx2", "avx512".
std::string_view simd_tier_name(SimdTier tier);

}  // namespace espalier::codec
