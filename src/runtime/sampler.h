// Chooses one token from one row of logits: greedy, or keyed Gumbel-max sampling over a filtered set.
//
// Order: NaN check, greedy (arg-max, lowest id on ties), else temperature, top_k, top_p, min_p, draw.
// A draw is a pure function of (logits, parameters, position): the same seed and prompt give the same reply whatever the
// chunking or drafting, and greedy choices depend on no sampling parameter. Source: docs/api.md, "Sampling".
#pragma once

#include <cstdint>
#include <span>

#include "base/status.h"

namespace espalier {

struct SamplingParams {
  double temperature = 1.0;  // below kGreedyTemperature: greedy
  double top_p = 1.0;        // (0, 1]: smallest set of most likely tokens with at least this mass
  int64_t top_k = 0;         // <= 0: off; else exactly k tokens (ties by lowest id)
  double min_p = 0.0;        // [0, 1]: keeps p >= min_p * max p
  uint64_t seed = 0;
};

inline constexpr double kGreedyTemperature = 1e-5;

inline bool is_greedy(const SamplingParams& params) { return params.temperature < kGreedyTemperature; }

// Chooses a token.
//
// logits    [vocab]:f32   -inf entries are never chosen: masked tokens
// position  absolute index in the sequence of the token being chosen
// Errors: internal when a logit is NaN or +inf, or when nothing is left to choose from.
// Threads: pure.   Cost: O(vocab), plus O(kept * log vocab) with top_k or top_p.
Result<int32_t> choose_token(std::span<const float> logits, const SamplingParams& params, int64_t position);

}  // namespace espalier
