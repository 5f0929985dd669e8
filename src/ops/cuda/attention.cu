#include "ops/cuda/attention.h"

#include "ops/cuda/lanes.cuh"
#include "ops/cuda/shared_memory.cuh"
#include "ops/scalar_math.h"

namespace espalier::ops::cuda {
namespace {

constexpr int kHeads = 4;         // of one block of threads; they share the keys they load
constexpr int kOnlinePlaces = 64;  // places between two looks at the maximum in the online form

// Shared memory of a block: the list's pointers, a score per head and place, and (online) a shrink factor per head and 64 places.
__host__ __device__ constexpr int64_t shared_bytes(int64_t max_keys) {
  return max_keys * static_cast<int64_t>(sizeof(const float*) + kHeads * sizeof(float)) +
         (max_keys + kOnlinePlaces - 1) / kOnlinePlaces * static_cast<int64_t>(kHeads * sizeof(float));
}

__device__ __forceinline__ float exp_f(float x) { return static_cast<float>(exp_d(static_cast<double>(x))); }

// Largest of the warp's values, none of which is NaN.
__device__ __forceinline__ float warp_max(float m) {
#pragma unroll
  for (int w = 16; w >= 1; w /= 2) {
    const float other = __shfl_xor_sync(0xFFFFFFFFu, m, w);
    m = other > m ? other : m;
  }
  return m;
}

// Scores of all places for kHeads heads from h0. Half a warp per key: channel i belongs to lane i mod 16, then the tree.
__device__ void score_places(const AttentionParams& p, const float* q, int n_heads, const float* const* keys, int64_t n_keys,
                             int64_t max_keys, float* scores) {
  const int lane = static_cast<int>(threadIdx.x % 16), team = static_cast<int>(threadIdx.x / 16);
  const unsigned mask = 0x0000FFFFu << (16 * (team % 2));
  const int64_t padded = (p.head_dim + 15) / 16 * 16;
  for (int64_t j = team; j < n_keys; j += blockDim.x / 16) {
    const float* kv = keys[j];
    float acc[kHeads] = {};
    if (kv != nullptr) {
      for (int64_t d = lane; d < padded; d += 16) {
        const bool is_channel = d < p.head_dim;
        const float v = is_channel ? kv[d] : 0.0f;
#pragma unroll
        for (int h = 0; h < kHeads; ++h) acc[h] = fmaf(is_channel && h < n_heads ? q[h * p.head_dim + d] : 0.0f, v, acc[h]);
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int w = 8; w >= 1; w /= 2) acc[h] = acc[h] + __shfl_down_sync(mask, acc[h], w, 16);
      if (lane == 0 && h < n_heads) scores[h * max_keys + j] = kv != nullptr ? acc[h] * p.scale : -INFINITY;
    }
  }
}

// One warp per head: scores become probabilities, and the denominator comes back (in lane 0).
__device__ float softmax_whole(float* s, int64_t n_keys, float sink, int lane) {
  float m = -1e30f;
  for (int64_t j = lane; j < n_keys; j += 32) m = s[j] > m ? s[j] : m;
  m = warp_max(m);
  for (int64_t j = lane; j < n_keys; j += 32) s[j] = exp_f(s[j] - m);
  __syncwarp();
  double sum = 0;
  if (lane == 0) {
#pragma unroll 8
    for (int64_t j = 0; j < n_keys; ++j) sum = sum + static_cast<double>(s[j]);
  }
  return static_cast<float>(sum + exp_d(static_cast<double>(sink - m)));
}

// The same block by block of 64 places: probabilities relative to the running maximum, rounded to bf16; shrink[b] is what the output so
// far is multiplied with before block b.
__device__ float softmax_online(float* s, int64_t n_keys, float sink, int lane, float* shrink) {
  float m = -1e30f, denominator = 0.0f;
  for (int64_t begin = 0; begin < n_keys; begin += kOnlinePlaces) {
    const int64_t end = begin + kOnlinePlaces < n_keys ? begin + kOnlinePlaces : n_keys;
    const float before = m;
    for (int64_t j = begin + lane; j < end; j += 32) m = s[j] > m ? s[j] : m;
    m = warp_max(m);
    const float factor = exp_f(before - m);
    for (int64_t j = begin + lane; j < end; j += 32) s[j] = exp_f(s[j] - m);
    __syncwarp();
    if (lane == 0) {
      double sum = 0;
      for (int64_t j = begin; j < end; ++j) sum = sum + static_cast<double>(s[j]);
      denominator = denominator * factor + static_cast<float>(sum);
      shrink[begin / kOnlinePlaces] = factor;
    }
    __syncwarp();
    for (int64_t j = begin + lane; j < end; j += 32) s[j] = round_bf16(s[j]);
  }
  return denominator + exp_f(sink - m);
}

// A block per row and kHeads heads.
__global__ __launch_bounds__(kRowThreads) void attention_kernel(AttentionParams p, int64_t max_keys) {
  extern __shared__ __align__(8) unsigned char raw[];
  const float** keys = reinterpret_cast<const float**>(raw);
  float* scores = reinterpret_cast<float*>(raw + max_keys * sizeof(const float*));
  float* shrink = scores + kHeads * max_keys;
  __shared__ float denominators[kHeads];
  const int64_t groups = (p.n_heads + kHeads - 1) / kHeads, max_blocks = (max_keys + kOnlinePlaces - 1) / kOnlinePlaces;
  const int64_t t = blockIdx.x / groups, h0 = blockIdx.x % groups * kHeads;
  const int n_heads = static_cast<int>(p.n_heads - h0 < kHeads ? p.n_heads - h0 : kHeads);
  const int64_t begin = p.key_begin[t];
  int64_t n_keys = p.key_begin[t + 1] - begin;
  n_keys = n_keys < max_keys ? n_keys : max_keys;
  for (int64_t j = threadIdx.x; j < n_keys; j += blockDim.x) keys[j] = p.keys[begin + j];
  __syncthreads();
  const float* q = p.q + (t * p.n_heads + h0) * p.head_dim;
  score_places(p, q, n_heads, keys, n_keys, max_keys, scores);
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  if (warp < n_heads) {
    float* s = scores + warp * max_keys;
    const float sink = p.sink[h0 + warp];
    const float denominator = p.is_online ? softmax_online(s, n_keys, sink, lane, shrink + warp * max_blocks)
                                          : softmax_whole(s, n_keys, sink, lane);
    if (lane == 0) denominators[warp] = denominator;
  }
  __syncthreads();
  float* out = p.out + (t * p.n_heads + h0) * p.head_dim;
  for (int64_t d = threadIdx.x; d < p.head_dim; d += blockDim.x) {
    float acc[kHeads] = {};
#pragma unroll 4
    for (int64_t j = 0; j < n_keys; ++j) {
      if (p.is_online && j % kOnlinePlaces == 0) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          if (h < n_heads) acc[h] = acc[h] * shrink[h * max_blocks + j / kOnlinePlaces];
        }
      }
      if (keys[j] == nullptr) continue;
      const float v = keys[j][d];
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (h < n_heads) acc[h] = fmaf(scores[h * max_keys + j], v, acc[h]);
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h < n_heads) out[h * p.head_dim + d] = acc[h] / denominators[h];
    }
  }
}

__global__ __launch_bounds__(kRowThreads) void compress_group_kernel(CompressGroupParams p) {
  const int64_t n = p.n_groups * p.d;
  for (int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; at < n; at += int64_t{gridDim.x} * blockDim.x) {
    const int64_t g = at / p.d, d = at % p.d;
    const float* const* kv = p.kv + g * p.ratio;
    const float* const* gate = p.gate + g * p.ratio;
    float top = gate[0][d];
    for (int64_t i = 1; i < p.ratio; ++i) top = gate[i][d] > top ? gate[i][d] : top;
    float total = 0;
    for (int64_t i = 0; i < p.ratio; ++i) total += exp_f(gate[i][d] - top);
    float sum = 0;
    for (int64_t i = 0; i < p.ratio; ++i) sum += exp_f(gate[i][d] - top) / total * kv[i][d];
    p.out[at] = sum;
  }
}

}  // namespace

Status attention(device::Stream& stream, const AttentionParams& p, int64_t max_keys) {
  if (p.n_rows == 0 || p.n_heads == 0) return ok_status();
  const size_t shared = static_cast<size_t>(shared_bytes(max_keys));
  RETURN_IF_ERROR(allow_shared_memory(stream, attention_kernel, shared, "attention over a long list"));
  const int64_t n_blocks = p.n_rows * ((p.n_heads + kHeads - 1) / kHeads);
  if (n_blocks > 0x7FFFFFFF) return invalid_argument("attention: " + std::to_string(p.n_rows) + " rows are too many for one launch");
  attention_kernel<<<static_cast<unsigned>(n_blocks), kRowThreads, shared, stream.handle()>>>(p, max_keys);
  return stream.launched("attention_kernel");
}

Status compress_group(device::Stream& stream, const CompressGroupParams& p) {
  if (p.n_groups * p.d == 0) return ok_status();
  compress_group_kernel<<<grid_for(p.n_groups * p.d, kRowThreads), kRowThreads, 0, stream.handle()>>>(p);
  return stream.launched("compress_group_kernel");
}

}  // namespace espalier::ops::cuda
