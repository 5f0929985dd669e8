// A projection inside the forward pass: tells the observer, applies the numerics' rounding points around Linear::apply.
// Internal to model/. Source: model.md 3.1.
#pragma once

#include <string>
#include <vector>

#include "model/forward.h"

namespace espalier {

enum class Rounding {
  kActQuant,  // vendor: e4m3 activations in, bf16 out (FP8 and FP4 linears)
  kBf16,      // vendor: bf16 out (wo_a, indexer.wk, weights_proj, compressor.wkv at ratio 1)
  kNone,      // fp32 in every numerics (router, mHC, compressor at ratio > 1, heads)
};

// y [n_rows, out]. `stem` is reported to the observer unless empty.
void project(const CallContext& context, const Linear& linear, const std::string& stem, const float* x, int64_t n_rows,
             Rounding rounding, float* y);
std::vector<float> project(const CallContext& context, const Linear& linear, const std::string& stem, const float* x,
                           int64_t n_rows, Rounding rounding);

// RMSNorm in place or out of place, bf16 in vendor numerics.
void normalise(const CallContext& context, const float* x, const std::vector<float>& weight, int64_t n_rows, float* y);

// bf16 in vendor numerics, else nothing.
void round_if_vendor(const CallContext& context, float* x, int64_t n);

}  // namespace espalier
