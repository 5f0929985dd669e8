// Expert selection: scores sqrt(softplus(logit / temperature)), the n_active best of score + bias, weights from the
// unbiased scores normalised by their sum and scaled. Source: model.md section 6.
//
// Scores are computed in double from fp32 logits and rounded to float; the sum runs over the chosen experts in
// ascending id order. Ties go to the lower id.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"

namespace espalier::ops {

struct RouterParams {
  const float* logits = nullptr;  // [n_rows, n_experts]
  const float* bias = nullptr;    // [n_experts]
  float* scores = nullptr;        // [n_rows, n_experts]
  int32_t* ids = nullptr;         // [n_rows, n_active], ascending
  float* weights = nullptr;       // [n_rows, n_active]
  int64_t n_rows = 0;
  int64_t n_experts = 0;
  int64_t n_active = 0;  // <= n_experts
  float temperature = 1;
  float scale = 1;
};

void router(ThreadPool& pool, const RouterParams& p);

namespace reference {
void router(const RouterParams& p);
}

}  // namespace espalier::ops
