#include "ops/cpu/kernels.h"  // kPanelWidth
#include "ops/cuda/lanes.cuh"
#include "ops/cuda/selection.h"
#include "ops/cuda/shared_memory.cuh"

namespace espalier::ops::cuda {
namespace {

constexpr int kScoreEntries = 32;  // of a block, one per lane
constexpr int kScoreWarps = kRowThreads / 32;
constexpr int kScoreHeads = 4;     // heads that share the loads of a key
constexpr int kKeysAtOnce = 32;   // channels of a key that are loaded together

// A block per 32 entries at a time; every warp has some of the heads, then warp 0 adds the heads' terms in ascending order.
__global__ __launch_bounds__(kRowThreads) void index_scores_kernel(IndexScoresParams p) {
  extern __shared__ __align__(16) float queries[];  // [n_heads, dim], then terms [n_heads, 32]
  float* terms = queries + p.n_heads * p.dim;
  const int64_t t = blockIdx.y, n = p.n_visible[t];
  if (int64_t{blockIdx.x} * kScoreEntries >= n) return;
  for (int64_t i = threadIdx.x; i < p.n_heads * p.dim; i += blockDim.x) queries[i] = p.queries[t * p.n_heads * p.dim + i];
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  static_assert(kScoreEntries == kPanelWidth);
  for (int64_t panel = blockIdx.x; panel * kScoreEntries < n; panel += gridDim.x) {
    const float* key = p.key_panels + panel * p.dim * kPanelWidth + lane;
    for (int64_t h0 = int64_t{warp} * kScoreHeads; h0 < p.n_heads; h0 += kScoreWarps * kScoreHeads) {
      const int heads = static_cast<int>(p.n_heads - h0 < kScoreHeads ? p.n_heads - h0 : kScoreHeads);
      float dot[kScoreHeads] = {};
      int64_t d = 0;
      if (heads == kScoreHeads && p.dim % 4 == 0) {  // many loads in flight, queries four at a time; the same order
        const float* query = queries + h0 * p.dim;
#pragma unroll 1
        for (; d + kKeysAtOnce <= p.dim; d += kKeysAtOnce) {
          float k[kKeysAtOnce];
#pragma unroll
          for (int i = 0; i < kKeysAtOnce; ++i) k[i] = key[(d + i) * kPanelWidth];
#pragma unroll
          for (int i = 0; i < kKeysAtOnce; i += 4) {
#pragma unroll
            for (int h = 0; h < kScoreHeads; ++h) {
              const float4 q = *reinterpret_cast<const float4*>(query + h * p.dim + d + i);
              dot[h] = fmaf(q.x, k[i], dot[h]), dot[h] = fmaf(q.y, k[i + 1], dot[h]);
              dot[h] = fmaf(q.z, k[i + 2], dot[h]), dot[h] = fmaf(q.w, k[i + 3], dot[h]);
            }
          }
        }
      }
#pragma unroll 8
      for (; d < p.dim; ++d) {
        const float k = key[d * kPanelWidth];
#pragma unroll
        for (int h = 0; h < kScoreHeads; ++h) {
          if (h < heads) dot[h] = fmaf(queries[(h0 + h) * p.dim + d], k, dot[h]);
        }
      }
#pragma unroll
      for (int h = 0; h < kScoreHeads; ++h) {
        if (h >= heads) continue;
        const float w = p.weights[t * p.n_heads + h0 + h];
        const float v = p.round_bf16 ? round_bf16(dot[h]) : dot[h];
        const float term = (v > 0.0f ? v : 0.0f) * w;
        terms[(h0 + h) * kScoreEntries + lane] = p.round_bf16 ? round_bf16(term) : term;
      }
    }
    __syncthreads();
    const int64_t j = panel * kScoreEntries + lane;
    if (warp == 0 && j < n) {
      float out = 0.0f;
      for (int64_t h = 0; h < p.n_heads; ++h) out = out + terms[h * kScoreEntries + lane];
      p.out[p.out_begin[t] + j] = p.round_bf16 ? round_bf16(out) : out;
    }
    __syncthreads();
  }
}

__global__ __launch_bounds__(kRowThreads) void set_index_keys_kernel(const float* keys, int64_t n, int64_t dim, const int64_t* start,
                                                                     int64_t ratio, float* panels) {
  const int64_t first = *start / ratio;
  for (int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; at < n * dim; at += int64_t{gridDim.x} * blockDim.x) {
    const int64_t j = first + at / dim, d = at % dim;
    panels[(j / kPanelWidth * dim + d) * kPanelWidth + j % kPanelWidth] = keys[at];
  }
}

}  // namespace

Status index_scores(device::Stream& stream, const IndexScoresParams& p, int64_t max_visible) {
  if (p.n_rows == 0 || max_visible == 0) return ok_status();
  if (p.n_rows > 65535) return invalid_argument("index_scores: expected at most 65535 rows, found " + std::to_string(p.n_rows));
  const size_t shared = static_cast<size_t>(p.n_heads * (p.dim + kScoreEntries)) * sizeof(float);
  RETURN_IF_ERROR(allow_shared_memory(stream, index_scores_kernel, shared, "index_scores"));
  const dim3 grid(grid_for(max_visible, kScoreEntries), static_cast<unsigned>(p.n_rows));
  index_scores_kernel<<<grid, kRowThreads, shared, stream.handle()>>>(p);
  return stream.launched("index_scores_kernel");
}

Status set_index_keys(device::Stream& stream, const float* keys, int64_t n, int64_t dim, const int64_t* start, int64_t ratio, float* panels) {
  if (n * dim == 0) return ok_status();
  set_index_keys_kernel<<<grid_for(n * dim, kRowThreads), kRowThreads, 0, stream.handle()>>>(keys, n, dim, start, ratio, panels);
  return stream.launched("set_index_keys_kernel");
}

}  // namespace espalier::ops::cuda
