// Choosing experts and entries on a GPU: the router, index scores, the k best of a list, candidate blocks.
//
// Lists and lengths live in device memory. Choices are exactly the CPU's (ties to the lower index, NaN as -infinity), values have its
// bits; other promises and errors as in ops/cuda/rows.h.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "device/stream.h"
#include "ops/index_scores.h"
#include "ops/router.h"

namespace espalier::ops::cuda {

Status router(device::Stream& stream, const RouterParams& p);

// max_visible: no n_visible is larger.
Status index_scores(device::Stream& stream, const IndexScoresParams& p, int64_t max_visible);
// keys [n, dim] become entries *start / ratio and following of `panels` (ops/index_scores.h); start is device memory.
Status set_index_keys(device::Stream& stream, const float* keys, int64_t n, int64_t dim, const int64_t* start, int64_t ratio, float* panels);

// select_top_k of ops/select.h for every row.
struct SelectParams {
  const float* scores = nullptr;      // row t: n[t] scores at begin[t]
  const int64_t* begin = nullptr;     // [n_rows]
  const int64_t* n = nullptr;         // [n_rows]
  int64_t k = 0;
  const uint8_t* allowed = nullptr;   // [n_rows, allowed_stride] by blocks of block_size entries; null: everything
  int64_t allowed_stride = 0;
  int64_t block_size = 1;
  int32_t* entries = nullptr;         // [n_rows, entries_stride] ascending; entries_stride >= min(k, largest n)
  int64_t entries_stride = 0;
  int64_t* n_selected = nullptr;      // [n_rows]
  int64_t n_rows = 0;
};
Status select_top_k(device::Stream& stream, const SelectParams& p);

// select_blocks of ops/select.h for every row.
struct SelectBlocksParams {
  const float* scores = nullptr;   // as above
  const int64_t* begin = nullptr;
  const int64_t* n = nullptr;
  int64_t k = 0;
  int64_t block_size = 1;
  int64_t n_blocks = 0;            // of a row of the mask; at least ceil(largest n / block_size)
  uint8_t* mask = nullptr;         // [n_rows, n_blocks]
  float* best = nullptr;           // scratch [n_rows, n_blocks]
  int32_t* chosen = nullptr;       // scratch [n_rows, n_blocks]
  int64_t* lengths = nullptr;      // scratch [3, n_rows]
  int64_t n_rows = 0;
};
Status select_blocks(device::Stream& stream, const SelectBlocksParams& p);

}  // namespace espalier::ops::cuda
