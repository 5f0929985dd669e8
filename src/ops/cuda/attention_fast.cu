#include "ops/cuda/attention_fast.h"

#include "ops/cuda/lanes.cuh"
#include "ops/cuda/shared_memory.cuh"

namespace espalier::ops::cuda {
namespace {

constexpr int kTile = 32;       // places
constexpr int kHeads = 8;       // of a block; one warp each for the softmax of a tile
constexpr int kThreads = 256;
constexpr int64_t kSplitRows = 8;  // up to so many rows every tile has a block of its own
constexpr float kLowest = -1e30f;

struct TileSums {
  float top, sum;  // maximum and sum of the exponentials relative to it
};

// What a block keeps in shared memory beside the tile of keys [kTile, channels].
struct Shared {
  const float* keys[kTile];
  float scores[kHeads][kTile];
  float4 weights[kTile][kHeads / 4];
  TileSums sums[kHeads];
};

// Adds 16 values over the lanes of a warp; lane l returns value l mod 16.
__device__ __forceinline__ float sum_sixteen(float (&v)[16], int lane) {
#pragma unroll
  for (int w = 8; w >= 1; w /= 2) {
#pragma unroll
    for (int i = 0; i < w; ++i) {
      const float keep = (lane & w) != 0 ? v[i + w] : v[i], send = (lane & w) != 0 ? v[i] : v[i + w];
      v[i] = keep + __shfl_xor_sync(0xFFFFFFFFu, send, w);
    }
  }
  return v[0] + __shfl_xor_sync(0xFFFFFFFFu, v[0], 16);
}

// Scores, weights and weighted sums of one tile: acc[h] are this thread's channels 2 * threadIdx.x and + 1. All threads of the block call it;
// false when the tile is empty.
template <int kChannels>
__device__ bool do_tile(const AttentionParams& p, int64_t first_key, int n_keys, const float* q, int n_heads, Shared& shared, float* tile,
                        float2 (&acc)[kHeads]) {
  constexpr int kVectors = kChannels / 128;  // of four channels, of a lane
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  __syncthreads();  // the tile before has been read
  const float* mine = nullptr;
  if (threadIdx.x < kTile && static_cast<int>(threadIdx.x) < n_keys) mine = p.keys[first_key + threadIdx.x];
  if (threadIdx.x < kTile) shared.keys[threadIdx.x] = mine;
  if (__syncthreads_or(mine != nullptr ? 1 : 0) == 0) return false;
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {  // a warp has four keys, two at a time
    float4 key[2][kVectors];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int at = 4 * warp + 2 * pair + j;
      const float* from = shared.keys[at];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        key[j][v] = from != nullptr ? reinterpret_cast<const float4*>(from)[lane + 32 * v] : float4{0, 0, 0, 0};
        reinterpret_cast<float4*>(tile + at * kChannels)[lane + 32 * v] = key[j][v];
      }
    }
    float dots[16];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      dots[h] = dots[kHeads + h] = 0.0f;
      if (h >= n_heads) continue;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const float4 a = reinterpret_cast<const float4*>(q + h * kChannels)[lane + 32 * v];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& dot = dots[kHeads * j + h];
          dot = fmaf(a.x, key[j][v].x, dot), dot = fmaf(a.y, key[j][v].y, dot);
          dot = fmaf(a.z, key[j][v].z, dot), dot = fmaf(a.w, key[j][v].w, dot);
        }
      }
    }
    const float dot = sum_sixteen(dots, lane);
    const int at = 4 * warp + 2 * pair + lane % 16 / kHeads;
    if (lane < 16) shared.scores[lane % kHeads][at] = shared.keys[at] != nullptr ? dot * p.scale : -INFINITY;
  }
  __syncthreads();
  {
    const float score = shared.scores[warp][lane];
    float top = score > kLowest ? score : kLowest;
#pragma unroll
    for (int w = 16; w >= 1; w /= 2) {
      const float other = __shfl_xor_sync(0xFFFFFFFFu, top, w);
      top = other > top ? other : top;
    }
    const float weight = expf(score - top), sum = warp_sum(weight);
    reinterpret_cast<float*>(shared.weights[lane])[warp] = weight;
    if (lane == 0) shared.sums[warp] = {top, sum};
  }
  __syncthreads();
#pragma unroll
  for (int h = 0; h < kHeads; ++h) acc[h] = {0, 0};
  if (2 * static_cast<int>(threadIdx.x) < kChannels) {
#pragma unroll 4
    for (int j = 0; j < kTile; ++j) {
      const float2 v = reinterpret_cast<const float2*>(tile + j * kChannels)[threadIdx.x];
      const float4 a = shared.weights[j][0], b = shared.weights[j][1];
      const float w[kHeads] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int h = 0; h < kHeads; ++h) acc[h] = {fmaf(w[h], v.x, acc[h].x), fmaf(w[h], v.y, acc[h].y)};
    }
  }
  return true;
}

// What has been added up over the tiles so far.
struct Running {
  float top = kLowest, sum = 0;
  float2 acc = {0, 0};

  __device__ __forceinline__ void add(const TileSums& of, const float2& tile_acc) {
    const float higher = of.top > top ? of.top : top;
    const float before = expf(top - higher), now = expf(of.top - higher);
    top = higher;
    sum = fmaf(of.sum, now, sum * before);
    acc = {fmaf(tile_acc.x, now, acc.x * before), fmaf(tile_acc.y, now, acc.y * before)};
  }
  __device__ __forceinline__ float2 result(float sink) const {
    const float denominator = sum + expf(sink - top);
    return {acc.x / denominator, acc.y / denominator};
  }
};

// Blocks: heads of a row by kHeads; kSplits: tiles too, whose sums go to parts: [rows, heads, tiles] TileSums, then their channels.
template <int kChannels, bool kSplits>
__global__ __launch_bounds__(kThreads, 2) void attention_fast_kernel(AttentionParams p, int64_t n_tiles, float* parts) {
  extern __shared__ __align__(16) float tile[];
  __shared__ Shared shared;
  const int64_t groups = (p.n_heads + kHeads - 1) / kHeads;
  const int64_t t = blockIdx.x / groups, h0 = blockIdx.x % groups * kHeads;
  const int n_heads = static_cast<int>(p.n_heads - h0 < kHeads ? p.n_heads - h0 : kHeads);
  const float* q = p.q + (t * p.n_heads + h0) * kChannels;
  const int64_t begin = p.key_begin[t], n_keys = p.key_begin[t + 1] - begin;
  const int64_t first_tile = kSplits ? blockIdx.y : 0, end_tile = kSplits ? first_tile + 1 : n_tiles;
  const bool has_channels = 2 * static_cast<int>(threadIdx.x) < kChannels;
  Running running[kSplits ? 1 : kHeads];
  for (int64_t i = first_tile; i < end_tile; ++i) {
    const int64_t left = n_keys - i * kTile;
    float2 acc[kHeads];
    const bool is_used = left > 0 && do_tile<kChannels>(p, begin + i * kTile, static_cast<int>(left < kTile ? left : kTile), q, n_heads, shared, tile, acc);
    if constexpr (kSplits) {
      const int64_t n_parts = p.n_rows * p.n_heads * n_tiles;
      TileSums* sums = reinterpret_cast<TileSums*>(parts);
      float2* channels = reinterpret_cast<float2*>(parts + 2 * n_parts);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (h >= n_heads) continue;
        const int64_t part = (t * p.n_heads + h0 + h) * n_tiles + i;
        if (threadIdx.x == 0) sums[part] = is_used ? shared.sums[h] : TileSums{kLowest, 0};
        if (is_used && has_channels) channels[part * (kChannels / 2) + threadIdx.x] = acc[h];
      }
    } else if (is_used) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) running[h].add(shared.sums[h], acc[h]);
    }
  }
  if constexpr (!kSplits) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h < n_heads && has_channels) {
        reinterpret_cast<float2*>(p.out + (t * p.n_heads + h0 + h) * kChannels)[threadIdx.x] = running[h].result(p.sink[h0 + h]);
      }
    }
  }
}

// A block per row and head: the tiles in order.
template <int kChannels>
__global__ __launch_bounds__(kChannels / 2) void merge_tiles_kernel(AttentionParams p, int64_t n_tiles, const float* parts) {
  const int64_t row_head = blockIdx.x, n_parts = p.n_rows * p.n_heads * n_tiles;
  const TileSums* sums = reinterpret_cast<const TileSums*>(parts) + row_head * n_tiles;
  const float2* channels = reinterpret_cast<const float2*>(parts + 2 * n_parts) + row_head * n_tiles * (kChannels / 2);
  Running running;
#pragma unroll 4
  for (int64_t i = 0; i < n_tiles; ++i) {
    const TileSums of = sums[i];
    if (of.sum == 0.0f) continue;  // an empty tile; another one has at least the exponential of its maximum
    running.add(of, channels[i * (kChannels / 2) + threadIdx.x]);
  }
  reinterpret_cast<float2*>(p.out + row_head * kChannels)[threadIdx.x] = running.result(p.sink[row_head % p.n_heads]);
}

template <int kChannels>
Status launch(device::Stream& stream, const AttentionParams& p, int64_t n_tiles, float* parts) {
  constexpr size_t kShared = size_t{kTile} * kChannels * sizeof(float);
  const int64_t n_blocks = p.n_rows * ((p.n_heads + kHeads - 1) / kHeads);
  if (n_blocks > 0x7FFFFFFF || n_tiles > 65535) {
    return invalid_argument("attention: " + std::to_string(p.n_rows) + " rows of " + std::to_string(n_tiles * kTile) + " places are too many for one launch");
  }
  if (p.n_rows > kSplitRows) {
    RETURN_IF_ERROR(allow_shared_memory(stream, attention_fast_kernel<kChannels, false>, kShared, "attention"));
    attention_fast_kernel<kChannels, false><<<static_cast<unsigned>(n_blocks), kThreads, kShared, stream.handle()>>>(p, n_tiles, parts);
    return stream.launched("attention_fast_kernel");
  }
  RETURN_IF_ERROR(allow_shared_memory(stream, attention_fast_kernel<kChannels, true>, kShared, "attention"));
  const dim3 grid(static_cast<unsigned>(n_blocks), static_cast<unsigned>(n_tiles));
  attention_fast_kernel<kChannels, true><<<grid, kThreads, kShared, stream.handle()>>>(p, n_tiles, parts);
  RETURN_IF_ERROR(stream.launched("attention_fast_kernel"));
  merge_tiles_kernel<kChannels><<<static_cast<unsigned>(p.n_rows * p.n_heads), kChannels / 2, 0, stream.handle()>>>(p, n_tiles, parts);
  return stream.launched("merge_tiles_kernel");
}

}  // namespace

bool can_attend_fast(const AttentionParams& p) {
  const bool is_known = p.head_dim == 128 || p.head_dim == 256 || p.head_dim == 512;
  return is_known && !p.is_online && reinterpret_cast<uintptr_t>(p.q) % 16 == 0 && reinterpret_cast<uintptr_t>(p.out) % 16 == 0;
}

int64_t attention_parts_size(const AttentionParams& p, int64_t max_keys) {
  if (p.n_rows > kSplitRows) return 0;
  return p.n_rows * p.n_heads * ((max_keys + kTile - 1) / kTile) * (p.head_dim + 2);
}

Status attention_fast(device::Stream& stream, const AttentionParams& p, int64_t max_keys, float* parts) {
  if (p.n_rows == 0 || p.n_heads == 0) return ok_status();
  const int64_t n_tiles = (max_keys + kTile - 1) / kTile;
  switch (can_attend_fast(p) ? p.head_dim : 0) {
    case 128: return launch<128>(stream, p, n_tiles, parts);
    case 256: return launch<256>(stream, p, n_tiles, parts);
    case 512: return launch<512>(stream, p, n_tiles, parts);
  }
  return invalid_argument("attention: expected heads of 128, 256 or 512 channels, found " + std::to_string(p.head_dim));
}

}  // namespace espalier::ops::cuda
