// Rotary position embedding on the last rope_dim channels of a head, adjacent pairs (u, v) -> (u cos - v sin, u sin + v
// cos).
//
// Frequencies are fp32 as in the vendor's code (f_i = 1 / base^(2i/rope_dim); YaRN blends f_i and f_i/factor), the
// angle is the fp32 product position * f_i, its sine and cosine come from scalar_math.h, rounded to float. Source:
// model.md 3.5.
#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.h"

namespace espalier::ops {

// f_i without YaRN, i = 0 .. rope_dim/2 - 1.
std::vector<float> rope_frequencies(int64_t rope_dim, double base);

struct YarnParams {
  double factor = 1;
  double beta_fast = 32;
  double beta_slow = 1;
  int64_t original_positions = 0;
};
std::vector<float> yarn_frequencies(int64_t rope_dim, double base, const YarnParams& yarn);

struct RopeParams {
  float* x = nullptr;                  // [n_rows, n_heads, head_dim], in place
  const int64_t* positions = nullptr;  // [n_rows]
  int64_t n_rows = 0;
  int64_t n_heads = 1;
  int64_t head_dim = 0;
  int64_t rope_dim = 0;
  const float* frequencies = nullptr;  // [rope_dim/2]
  bool is_inverse = false;             // negated angle
};

void rope(ThreadPool& pool, const RopeParams& p);

namespace reference {
void rope(const RopeParams& p);
}

}  // namespace espalier::ops
