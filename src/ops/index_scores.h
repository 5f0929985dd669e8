// Scores of compressed entries for the sparse selection: score(j) = sum_h w[h] * max(0, q[h] . k_j). Source:
// model.md 5.4.
//
// Dot products are FMA chains over the channel; heads are added in ascending order, one rounding per operation. With
// round_bf16 the dot products, the weighted terms and the sum are bf16 as in the vendor's code.
// Keys live in panels of 32 entries so that new entries append without repacking: [ceil(n/32)][dim][32].
#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.h"

namespace espalier::ops {

// Writes entry j into `panels`, which must hold ceil((j+1)/32) panels.
void set_index_key(float* panels, int64_t dim, int64_t j, const float* key);
void get_index_key(const float* panels, int64_t dim, int64_t j, float* key);

struct IndexScoresParams {
  const float* queries = nullptr;      // [n_rows, n_heads, dim]
  const float* weights = nullptr;      // [n_rows, n_heads], any sign
  const float* key_panels = nullptr;   // at least max(n_visible) entries
  const int64_t* n_visible = nullptr;  // [n_rows] entries scored for each row
  const int64_t* out_begin = nullptr;  // [n_rows] where a row's scores start in out
  float* out = nullptr;
  int64_t n_rows = 0;
  int64_t n_heads = 0;
  int64_t dim = 0;
  bool round_bf16 = false;
};

void index_scores(ThreadPool& pool, const IndexScoresParams& p);

namespace reference {
void index_scores(const IndexScoresParams& p);
}

}  // namespace espalier::ops
