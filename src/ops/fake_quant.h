// Rounding of values to the released cache and activation formats, in place (quantise, dequantise). Exact rules: every
// implementation gives the same bits, the reference (which goes through the codes) included. Source: model.md 3.2, 3.3.
//
// act  e4m3 codes, groups of 32, power-of-two scale:        activations of FP8 and FP4 linears, window keys
// fp4  e2m1 codes, groups of 32, power-of-two (e8m0) scale: index queries and keys
// kv4  e2m1 codes, groups of 16, e4m3 scale:                compressed KV
// The last group of a row may be shorter. Results are exact in bf16.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"

namespace espalier::ops {

enum class FakeQuantFormat { kAct, kFp4, kKv4 };

struct FakeQuantParams {
  float* x = nullptr;  // [n_rows, d], in place
  int64_t n_rows = 0;
  int64_t d = 0;
  FakeQuantFormat format = FakeQuantFormat::kAct;
};

void fake_quant(ThreadPool& pool, const FakeQuantParams& p);

// Values that share a scale.
constexpr int64_t fake_quant_group(FakeQuantFormat format) {
  return format == FakeQuantFormat::kKv4 ? 16 : 32;
}

// x[i] = bf16(x[i]).
void round_to_bf16(ThreadPool& pool, float* x, int64_t n);

namespace reference {
void fake_quant(const FakeQuantParams& p);
}

}  // namespace espalier::ops
