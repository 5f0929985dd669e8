// Which implementation the operations use: the plain-loop reference, or one of the CPU tiers. All CPU tiers give the
// same bits (fixed-order arithmetic); the reference uses double accumulators and agrees within rounding. The tier is
// process-wide and is pinned for tests and bug reports; by default it is the best one that the machine runs.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

namespace espalier::ops {

enum class Tier { kReference, kBaseline, kAvx2, kAvx512 };

// Best CPU tier of this machine.
Tier detected_tier();
Tier active_tier();
// Returns false (and changes nothing) when the machine cannot run `tier`. Not while operations are running.
bool set_simd_tier(Tier tier);
// Back to detected_tier().
void reset_simd_tier();
// CPU tiers that this machine runs, slowest first, without the reference.
std::vector<Tier> available_tiers();
// "reference", "baseline", "avx2", "avx512".
std::string_view tier_name(Tier tier);
std::optional<Tier> tier_from_name(std::string_view name);

}  // namespace espalier::ops
