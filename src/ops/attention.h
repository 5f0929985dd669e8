// Attention of single query rows over explicit lists of key rows that serve as keys and values for all heads, with a
// sink that only enters the denominator. Source: model.md 5.6.
//
// s_j = (q . kv_j) * scale;  m = max(max_j s_j, -1e30);  o = sum_j exp(s_j - m) kv_j / (sum_j exp(s_j - m) + exp(sink -
// m)) Fixed order: a dot product has 16 FMA lanes (channel i in lane i mod 16) and a fixed tree; the output is an FMA
// chain over the list; the denominator is a double sum in list order. A row depends on its own list only. The online
// form is the vendor kernel's: blocks of 64 places, bf16 probabilities relative to the running maximum.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"

namespace espalier::ops {

struct AttentionParams {
  const float* q = nullptr;  // [n_rows, n_heads, head_dim]
  const float* const* keys =
      nullptr;  // key_begin[n_rows] pointers to rows [head_dim]; null: empty place (online form only)
  const int64_t* key_begin = nullptr;  // [n_rows + 1]; row t attends keys[key_begin[t] .. key_begin[t+1])
  const float* sink = nullptr;         // [n_heads]
  float* out = nullptr;                // [n_rows, n_heads, head_dim]; must not alias q. An empty list gives zeros.
  int64_t n_rows = 0;
  int64_t n_heads = 0;
  int64_t head_dim = 0;
  float scale = 1;
  bool is_online = false;
};

void attention(ThreadPool& pool, const AttentionParams& p);

namespace reference {
void attention(const AttentionParams& p);
}

}  // namespace espalier::ops
