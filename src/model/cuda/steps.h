// Small steps between the operations of a forward pass on a GPU: embedding rows, lists of positions, lengths and keys, copies into
// caches, and the sums that join the parts. All pointers are device memory; every call queues one launch. The position at which a call
// starts is read from device memory (`start`), so that recorded launches serve every position. Internal to model/cuda.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "device/stream.h"

namespace espalier::cuda {

// h [n, n_streams, d] := the bf16 rows `ids` of embed in every stream; pre [n, n_streams] := (1, 0, ...).
Status embed_rows(device::Stream& stream, const uint16_t* embed, const int32_t* ids, int64_t n, int64_t n_streams, int64_t d, float* h,
                  float* pre);

// positions[i] = (start / ratio + i) * ratio: with ratio 1 those of rows, else the first tokens of the groups from start's on.
Status fill_positions(device::Stream& stream, const int64_t* start, int64_t ratio, int64_t n, int64_t* positions);
// Row t at position start + t sees (start + t + 1) / ratio entries; its scores begin at t * stride.
Status fill_visible(device::Stream& stream, const int64_t* start, int64_t ratio, int64_t stride, int64_t n_rows, int64_t* n_visible,
                    int64_t* begin);

// x[i] *= factor.
Status scale(device::Stream& stream, float* x, int64_t n, float factor);
// out [n_rows, d] := mean over the streams of h [n_rows, n_streams, d]; rows of out are out_stride apart.
Status mean_of_streams(device::Stream& stream, const float* h, int64_t n_rows, int64_t n_streams, int64_t d, float* out, int64_t out_stride);
// y [n_rows, d] := sum over the row's slots of outputs [n_rows * n_active, d], ascending from zero, then shared [n_rows, d]. Slot s lies at
// place[s] of outputs; place null: at s.
Status join_experts(device::Stream& stream, const float* outputs, const int32_t* place, const float* shared, int64_t n_rows, int64_t n_active,
                    int64_t d, float* y);
// Slots in another order: the i-th is order[i], of row order[i] / n_active. place is the inverse of order.
struct SlotOrder {
  const int32_t* order = nullptr;   // [n_slots]
  const float* x = nullptr;         // [n_slots / n_active, d]
  const int32_t* ids = nullptr;     // [n_slots]
  const float* weights = nullptr;   // [n_slots]
  int64_t n_slots = 0;
  int64_t n_active = 0;
  int64_t d = 0;
  float* x_to = nullptr;            // [n_slots, d]
  int32_t* ids_to = nullptr;        // [n_slots]
  float* weights_to = nullptr;      // [n_slots]
  int32_t* place = nullptr;         // [n_slots]
};
Status order_slots(device::Stream& stream, const SlotOrder& p);

// Rows at positions: `own` holds those from `start` on, a ring those before.
struct RowsByPosition {
  const float* own = nullptr;   // [n, d]
  const float* ring = nullptr;  // [n_slots, d]; slot = position mod n_slots
  const int64_t* start = nullptr;
  int64_t n_slots = 1;
  int64_t d = 0;
};

// rows[i] points to the row at position start / ratio * ratio + i.
Status point_to_rows(device::Stream& stream, const RowsByPosition& from, int64_t ratio, int64_t n, const float** rows);
// ring[(start + t) mod n_slots] := own[t] for the last min(n, n_slots) of n rows.
Status write_ring(device::Stream& stream, const float* own, const int64_t* start, int64_t n, int64_t n_slots, int64_t d, float* ring);
// to[start / ratio + i] := rows[i], of d elements each.
Status write_entries(device::Stream& stream, const float* rows, const int64_t* start, int64_t ratio, int64_t n, int64_t d, float* to);
// to [n_inner, n_outer, d] := from [n_outer, n_inner, d] with the first two dimensions exchanged.
Status swap_rows(device::Stream& stream, const float* from, int64_t n_outer, int64_t n_inner, int64_t d, float* to);

// Key lists of n_rows rows at positions window.start + t, each of n_places places: n_window of them for the positions
// max(0, p - window_size + 1) .. p, the rest for the selected entries; empty places are null.
struct KeyListParams {
  RowsByPosition window;
  int64_t window_size = 0;
  int64_t n_window = 0;
  const float* entries = nullptr;         // [.., d] compressed cache; null: window only
  const int32_t* selected = nullptr;      // [n_rows, selected_stride]
  int64_t selected_stride = 0;
  const int64_t* n_selected = nullptr;    // [n_rows]
  int64_t n_rows = 0;
  int64_t n_places = 0;                   // n_window + selected_stride, or n_window
  const float** keys = nullptr;           // [n_rows, n_places]
  int64_t* begin = nullptr;               // [n_rows + 1]
};
Status make_key_lists(device::Stream& stream, const KeyListParams& p);

// Key lists of a draft block, the same for every row: n_before ring positions before start, then the block's own n_rows rows.
Status make_draft_lists(device::Stream& stream, const RowsByPosition& from, int64_t n_before, int64_t n_rows, const float** keys, int64_t* begin);

}  // namespace espalier::cuda
