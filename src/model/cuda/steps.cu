#include "model/cuda/steps.h"

#include "ops/cuda/lanes.cuh"

namespace espalier::cuda {
namespace {

using ops::cuda::grid_for;
using ops::cuda::kRowThreads;

__device__ __forceinline__ int64_t first_index() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ __forceinline__ int64_t index_step() { return int64_t{gridDim.x} * blockDim.x; }

__device__ __forceinline__ const float* row_at(const RowsByPosition& from, int64_t position) {
  return position < *from.start ? from.ring + position % from.n_slots * from.d : from.own + (position - *from.start) * from.d;
}

__global__ void embed_rows_kernel(const uint16_t* embed, const int32_t* ids, int64_t n, int64_t n_streams, int64_t d, float* h, float* pre) {
  for (int64_t at = first_index(); at < n * n_streams * d; at += index_step()) {
    const int64_t row = at / d, t = row / n_streams;
    h[at] = __uint_as_float(static_cast<uint32_t>(embed[int64_t{ids[t]} * d + at % d]) << 16);
    if (at % d == 0) pre[row] = row % n_streams == 0 ? 1.0f : 0.0f;
  }
}

__global__ void fill_positions_kernel(const int64_t* start, int64_t ratio, int64_t n, int64_t* positions) {
  for (int64_t i = first_index(); i < n; i += index_step()) positions[i] = (*start / ratio + i) * ratio;
}

__global__ void fill_visible_kernel(const int64_t* start, int64_t ratio, int64_t stride, int64_t n_rows, int64_t* n_visible, int64_t* begin) {
  for (int64_t t = first_index(); t < n_rows; t += index_step()) {
    n_visible[t] = (*start + t + 1) / ratio;
    begin[t] = t * stride;
  }
}

__global__ void scale_kernel(float* x, int64_t n, float factor) {
  for (int64_t i = first_index(); i < n; i += index_step()) x[i] *= factor;
}

__global__ void mean_of_streams_kernel(const float* h, int64_t n_rows, int64_t n_streams, int64_t d, float* out, int64_t out_stride) {
  for (int64_t at = first_index(); at < n_rows * d; at += index_step()) {
    const int64_t t = at / d, i = at % d;
    const float* row = h + t * n_streams * d + i;
    float sum = row[0];
    for (int64_t s = 1; s < n_streams; ++s) sum += row[s * d];
    out[t * out_stride + i] = sum / static_cast<float>(n_streams);
  }
}

__global__ void join_experts_kernel(const float* outputs, const int32_t* place, const float* shared, int64_t n_rows, int64_t n_active, int64_t d,
                                    float* y) {
  for (int64_t t = blockIdx.y; t < n_rows; t += gridDim.y) {
    for (int64_t j = first_index(); j < d; j += index_step()) {
      float sum = 0.0f;
      for (int64_t slot = t * n_active; slot < (t + 1) * n_active; ++slot) sum += outputs[(place != nullptr ? int64_t{place[slot]} : slot) * d + j];
      y[t * d + j] = sum + shared[t * d + j];
    }
  }
}

__global__ void order_slots_kernel(SlotOrder p) {
  for (int64_t at = first_index(); at < p.n_slots * p.d; at += index_step()) {
    const int64_t i = at / p.d, j = at % p.d, slot = p.order[i];
    p.x_to[at] = p.x[slot / p.n_active * p.d + j];
    if (j != 0) continue;
    p.ids_to[i] = p.ids[slot];
    p.weights_to[i] = p.weights[slot];
    p.place[slot] = static_cast<int32_t>(i);
  }
}

__global__ void point_to_rows_kernel(RowsByPosition from, int64_t ratio, int64_t n, const float** rows) {
  for (int64_t i = first_index(); i < n; i += index_step()) rows[i] = row_at(from, *from.start / ratio * ratio + i);
}

__global__ void write_ring_kernel(const float* own, const int64_t* start, int64_t skip, int64_t n, int64_t n_slots, int64_t d, float* ring) {
  for (int64_t at = first_index(); at < (n - skip) * d; at += index_step()) {
    const int64_t t = skip + at / d;
    ring[(*start + t) % n_slots * d + at % d] = own[t * d + at % d];
  }
}

__global__ void write_entries_kernel(const float* rows, const int64_t* start, int64_t ratio, int64_t n, int64_t d, float* to) {
  for (int64_t at = first_index(); at < n * d; at += index_step()) to[*start / ratio * d + at] = rows[at];
}

__global__ void swap_rows_kernel(const float* from, int64_t n_outer, int64_t n_inner, int64_t d, float* to) {
  for (int64_t at = first_index(); at < n_outer * n_inner * d; at += index_step()) {
    const int64_t row = at / d, i = row % n_outer, j = row / n_outer;
    to[at] = from[(i * n_inner + j) * d + at % d];
  }
}

__global__ void make_key_lists_kernel(KeyListParams p) {
  for (int64_t at = first_index(); at < p.n_rows * p.n_places; at += index_step()) {
    const int64_t t = at / p.n_places, i = at % p.n_places, position = *p.window.start + t;
    const float* key = nullptr;
    if (i < p.n_window) {
      const int64_t j = (position >= p.window_size ? position - p.window_size + 1 : 0) + i;
      if (j <= position) key = row_at(p.window, j);
    } else if (i - p.n_window < p.n_selected[t]) {
      key = p.entries + p.selected[t * p.selected_stride + i - p.n_window] * p.window.d;
    }
    p.keys[at] = key;
    if (i == 0) p.begin[t] = at;
    if (at == p.n_rows * p.n_places - 1) p.begin[p.n_rows] = at + 1;
  }
}

__global__ void make_draft_lists_kernel(RowsByPosition from, int64_t n_before, int64_t n_rows, const float** keys, int64_t* begin) {
  const int64_t n_places = n_before + n_rows, first = *from.start - n_before;
  for (int64_t at = first_index(); at < n_rows * n_places; at += index_step()) {
    keys[at] = row_at(from, first + at % n_places);
    if (at % n_places == 0) begin[at / n_places] = at;
    if (at == n_rows * n_places - 1) begin[n_rows] = at + 1;
  }
}

}  // namespace

Status embed_rows(device::Stream& stream, const uint16_t* embed, const int32_t* ids, int64_t n, int64_t n_streams, int64_t d, float* h,
                  float* pre) {
  embed_rows_kernel<<<grid_for(n * n_streams * d, kRowThreads), kRowThreads, 0, stream.handle()>>>(embed, ids, n, n_streams, d, h, pre);
  return stream.launched("embed_rows_kernel");
}

Status fill_positions(device::Stream& stream, const int64_t* start, int64_t ratio, int64_t n, int64_t* positions) {
  fill_positions_kernel<<<grid_for(n, kRowThreads), kRowThreads, 0, stream.handle()>>>(start, ratio, n, positions);
  return stream.launched("fill_positions_kernel");
}

Status fill_visible(device::Stream& stream, const int64_t* start, int64_t ratio, int64_t stride, int64_t n_rows, int64_t* n_visible,
                    int64_t* begin) {
  fill_visible_kernel<<<grid_for(n_rows, kRowThreads), kRowThreads, 0, stream.handle()>>>(start, ratio, stride, n_rows, n_visible, begin);
  return stream.launched("fill_visible_kernel");
}

Status scale(device::Stream& stream, float* x, int64_t n, float factor) {
  scale_kernel<<<grid_for(n, kRowThreads), kRowThreads, 0, stream.handle()>>>(x, n, factor);
  return stream.launched("scale_kernel");
}

Status mean_of_streams(device::Stream& stream, const float* h, int64_t n_rows, int64_t n_streams, int64_t d, float* out, int64_t out_stride) {
  mean_of_streams_kernel<<<grid_for(n_rows * d, kRowThreads), kRowThreads, 0, stream.handle()>>>(h, n_rows, n_streams, d, out, out_stride);
  return stream.launched("mean_of_streams_kernel");
}

Status order_slots(device::Stream& stream, const SlotOrder& p) {
  order_slots_kernel<<<grid_for(p.n_slots * p.d, kRowThreads), kRowThreads, 0, stream.handle()>>>(p);
  return stream.launched("order_slots_kernel");
}

Status join_experts(device::Stream& stream, const float* outputs, const int32_t* place, const float* shared, int64_t n_rows, int64_t n_active,
                    int64_t d, float* y) {
  const dim3 grid(grid_for(d, kRowThreads), static_cast<unsigned>(n_rows < 65535 ? n_rows : 65535));
  join_experts_kernel<<<grid, kRowThreads, 0, stream.handle()>>>(outputs, place, shared, n_rows, n_active, d, y);
  return stream.launched("join_experts_kernel");
}

Status point_to_rows(device::Stream& stream, const RowsByPosition& from, int64_t ratio, int64_t n, const float** rows) {
  if (n == 0) return ok_status();
  point_to_rows_kernel<<<grid_for(n, kRowThreads), kRowThreads, 0, stream.handle()>>>(from, ratio, n, rows);
  return stream.launched("point_to_rows_kernel");
}

Status write_ring(device::Stream& stream, const float* own, const int64_t* start, int64_t n, int64_t n_slots, int64_t d, float* ring) {
  const int64_t skip = n > n_slots ? n - n_slots : 0;
  if (n == 0) return ok_status();
  write_ring_kernel<<<grid_for((n - skip) * d, kRowThreads), kRowThreads, 0, stream.handle()>>>(own, start, skip, n, n_slots, d, ring);
  return stream.launched("write_ring_kernel");
}

Status write_entries(device::Stream& stream, const float* rows, const int64_t* start, int64_t ratio, int64_t n, int64_t d, float* to) {
  if (n == 0) return ok_status();
  write_entries_kernel<<<grid_for(n * d, kRowThreads), kRowThreads, 0, stream.handle()>>>(rows, start, ratio, n, d, to);
  return stream.launched("write_entries_kernel");
}

Status swap_rows(device::Stream& stream, const float* from, int64_t n_outer, int64_t n_inner, int64_t d, float* to) {
  swap_rows_kernel<<<grid_for(n_outer * n_inner * d, kRowThreads), kRowThreads, 0, stream.handle()>>>(from, n_outer, n_inner, d, to);
  return stream.launched("swap_rows_kernel");
}

Status make_key_lists(device::Stream& stream, const KeyListParams& p) {
  make_key_lists_kernel<<<grid_for(p.n_rows * p.n_places, kRowThreads), kRowThreads, 0, stream.handle()>>>(p);
  return stream.launched("make_key_lists_kernel");
}

Status make_draft_lists(device::Stream& stream, const RowsByPosition& from, int64_t n_before, int64_t n_rows, const float** keys, int64_t* begin) {
  const int64_t n_places = n_before + n_rows;
  make_draft_lists_kernel<<<grid_for(n_rows * n_places, kRowThreads), kRowThreads, 0, stream.handle()>>>(from, n_before, n_rows, keys, begin);
  return stream.launched("make_draft_lists_kernel");
}

}  // namespace espalier::cuda
