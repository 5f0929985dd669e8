// Engram's gated addition to each residual stream: h[c] += g_c * value with
// g_c = sigmoid(signed sqrt of the normalised, weighted dot product of stream and key). Source: model.md 7.4.
//
// The dot product and both statistics are sums of 16 double lanes with a fixed tree; the gate is double, rounded to
// float; the addition is a product and a sum in float.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"

namespace espalier::ops {

struct EngramGateParams {
  float* h = nullptr;               // [n_rows, n_streams, d_model], in place
  const float* kv = nullptr;        // [n_rows, (n_streams + 1) * d_model]: a key per stream, then the shared value
  const float* q_weight = nullptr;  // [n_streams, d_model]
  const float* k_weight = nullptr;  // [n_streams, d_model]
  int64_t n_rows = 0;
  int64_t n_streams = 0;
  int64_t d_model = 0;
  double norm_eps = 0;
};

void engram_gate(ThreadPool& pool, const EngramGateParams& p);

namespace reference {
void engram_gate(const EngramGateParams& p);
}

}  // namespace espalier::ops
