#include "ops/cuda/selection.h"

#include "ops/cpu/kernels.h"  // kPanelWidth
#include "ops/cuda/lanes.cuh"
#include "ops/cuda/shared_memory.cuh"
#include "ops/scalar_math.h"

namespace espalier::ops::cuda {
namespace {

constexpr int kSelectThreads = 1024;
constexpr int kSelectWarps = kSelectThreads / 32;

// --- router ---

struct Best {
  float score;
  int index;  // -1: none
};

__device__ __forceinline__ bool is_better(const Best& a, const Best& b) {
  if (a.index < 0) return false;
  if (b.index < 0) return true;
  return a.score != b.score ? a.score > b.score : a.index < b.index;
}

// A block per row: scores of all experts, then n_active rounds of "the best one not taken yet".
__global__ __launch_bounds__(kRowThreads) void router_kernel(RouterParams p) {
  extern __shared__ float biased[];  // [n_experts] scores, then [n_active] chosen ids as ints
  const int n = static_cast<int>(p.n_experts), k = static_cast<int>(p.n_active);
  int* chosen = reinterpret_cast<int*>(biased + n);
  __shared__ Best warp_best[kRowThreads / 32];
  const int64_t t = blockIdx.x;
  float* scores = p.scores + t * n;
  for (int e = static_cast<int>(threadIdx.x); e < n; e += kRowThreads) {
    const float logit = p.logits[t * n + e] / p.temperature;
    const float score = static_cast<float>(sqrt(softplus_d(static_cast<double>(logit))));
    scores[e] = score;
    const float sum = score + p.bias[e];
    biased[e] = isnan(sum) ? -INFINITY : sum;
  }
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  for (int round = 0; round < k; ++round) {
    __syncthreads();
    Best best = {0, -1};
    for (int e = static_cast<int>(threadIdx.x); e < n; e += kRowThreads) {
      bool is_taken = false;
      for (int i = 0; i < round; ++i) is_taken = is_taken || chosen[i] == e;
      const Best candidate = {biased[e], e};
      if (!is_taken && is_better(candidate, best)) best = candidate;
    }
    for (int w = 16; w >= 1; w /= 2) {
      const Best other = {__shfl_xor_sync(0xFFFFFFFFu, best.score, w), __shfl_xor_sync(0xFFFFFFFFu, best.index, w)};
      if (is_better(other, best)) best = other;
    }
    if (lane == 0) warp_best[warp] = best;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int i = 1; i < kRowThreads / 32; ++i) {
        if (is_better(warp_best[i], best)) best = warp_best[i];
      }
      chosen[round] = best.index;
    }
  }
  if (threadIdx.x != 0) return;
  for (int i = 1; i < k; ++i) {  // ascending
    const int id = chosen[i];
    int j = i;
    for (; j > 0 && chosen[j - 1] > id; --j) chosen[j] = chosen[j - 1];
    chosen[j] = id;
  }
  float sum = 0;
  for (int i = 0; i < k; ++i) sum += scores[chosen[i]];
  for (int i = 0; i < k; ++i) {
    p.ids[t * k + i] = chosen[i];
    p.weights[t * k + i] = scores[chosen[i]] / (sum + 1e-20f) * p.scale;
  }
}

// --- index scores ---

constexpr int kScoreHeads = 8;  // heads that share the loads of a key

// A thread per entry; the row's queries lie in shared memory.
__global__ __launch_bounds__(kRowThreads) void index_scores_kernel(IndexScoresParams p) {
  extern __shared__ float queries[];  // [n_heads, dim]
  const int64_t t = blockIdx.y, n = p.n_visible[t];
  if (int64_t{blockIdx.x} * blockDim.x >= n) return;
  for (int64_t i = threadIdx.x; i < p.n_heads * p.dim; i += blockDim.x) queries[i] = p.queries[t * p.n_heads * p.dim + i];
  __syncthreads();
  for (int64_t j = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; j < n; j += int64_t{gridDim.x} * blockDim.x) {
    const float* key = p.key_panels + j / kPanelWidth * p.dim * kPanelWidth + j % kPanelWidth;
    float out = 0.0f;
    for (int64_t h0 = 0; h0 < p.n_heads; h0 += kScoreHeads) {
      const int heads = static_cast<int>(p.n_heads - h0 < kScoreHeads ? p.n_heads - h0 : kScoreHeads);
      float dot[kScoreHeads] = {};
      for (int64_t d = 0; d < p.dim; ++d) {
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
        if (p.round_bf16) {
          const float v = round_bf16(dot[h]);
          out = out + round_bf16((v > 0.0f ? v : 0.0f) * w);
        } else {
          out = out + (dot[h] > 0.0f ? dot[h] : 0.0f) * w;
        }
      }
    }
    p.out[p.out_begin[t] + j] = p.round_bf16 ? round_bf16(out) : out;
  }
}

__global__ __launch_bounds__(kRowThreads) void set_index_keys_kernel(const float* keys, int64_t n, int64_t dim, int64_t first, float* panels) {
  for (int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; at < n * dim; at += int64_t{gridDim.x} * blockDim.x) {
    const int64_t j = first + at / dim, d = at % dim;
    panels[(j / kPanelWidth * dim + d) * kPanelWidth + j % kPanelWidth] = keys[at];
  }
}

// --- the k best ---

// Larger is better; NaN counts as -infinity, and both zeros are equal.
__device__ __forceinline__ uint32_t rank_of(float score) {
  if (isnan(score)) score = -INFINITY;
  if (score == 0.0f) score = 0.0f;
  const uint32_t u = __float_as_uint(score);
  return (u & 0x80000000u) != 0 ? ~u : u | 0x80000000u;
}

// Exclusive count of set flags before this thread in the block, and the block's total. All threads call it.
__device__ int block_count_before(bool flag, int* warp_counts, int* total) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const unsigned votes = __ballot_sync(0xFFFFFFFFu, flag);
  __syncthreads();  // the counts of the call before are read
  if (lane == 0) warp_counts[warp] = __popc(votes);
  __syncthreads();
  int before = 0, all = 0;
  for (int w = 0; w < kSelectWarps; ++w) {
    if (w < warp) before += warp_counts[w];
    all += warp_counts[w];
  }
  *total = all;
  return before + __popc(votes & ((1u << lane) - 1));
}

// A block per row. Four passes over the scores find the rank of the k-th best, byte by byte from the top, by counting; a last pass writes
// what is above it, and of its equals the first ones, in ascending order of index. Counts are integers, so the atomics are exact.
__global__ __launch_bounds__(kSelectThreads) void select_top_k_kernel(SelectParams p) {
  __shared__ int histogram[256];
  __shared__ int warp_counts[kSelectWarps];
  __shared__ uint32_t shared_prefix;
  __shared__ int64_t shared_left;
  __shared__ bool shared_all;
  const int64_t t = blockIdx.x, n = p.n[t];
  const float* scores = p.scores + p.begin[t];
  const uint8_t* allowed = p.allowed != nullptr ? p.allowed + t * p.allowed_stride : nullptr;
  const auto is_allowed = [&](int64_t j) { return allowed == nullptr || allowed[j / p.block_size] != 0; };
  if (threadIdx.x == 0) {
    shared_prefix = 0;
    shared_left = p.k;
    shared_all = false;
  }
  for (int pass = 0; pass < 4; ++pass) {
    const int shift = 24 - 8 * pass;
    if (threadIdx.x < 256) histogram[threadIdx.x] = 0;
    __syncthreads();
    const uint32_t prefix = shared_prefix;
    for (int64_t j = threadIdx.x; j < n; j += kSelectThreads) {
      if (!is_allowed(j)) continue;
      const uint32_t rank = rank_of(scores[j]);
      if (pass > 0 && (rank >> (shift + 8)) != (prefix >> (shift + 8))) continue;
      atomicAdd(&histogram[(rank >> shift) & 255u], 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int64_t left = shared_left;
      int bin = 255;
      for (; bin >= 0 && histogram[bin] < left; --bin) left -= histogram[bin];
      if (bin < 0) {
        shared_all = true;  // only in the first pass: fewer are allowed than asked for
      } else {
        shared_prefix = prefix | (static_cast<uint32_t>(bin) << shift);
        shared_left = left;
      }
    }
    __syncthreads();
    if (shared_all) break;
  }
  const bool takes_all = shared_all;
  const uint32_t threshold = shared_prefix;
  const int64_t n_equal_wanted = shared_left;
  int64_t n_equal = 0, n_out = 0;
  int32_t* entries = p.entries + t * p.entries_stride;
  for (int64_t begin = 0; begin < n; begin += kSelectThreads) {
    const int64_t j = begin + threadIdx.x;
    const bool is_candidate = j < n && is_allowed(j);
    const uint32_t rank = is_candidate ? rank_of(scores[j]) : 0;
    const bool is_equal = is_candidate && !takes_all && rank == threshold;
    int equal_total, taken_total;
    const int equal_before = block_count_before(is_equal, warp_counts, &equal_total);
    const bool is_taken = is_candidate && (takes_all || rank > threshold || (is_equal && n_equal + equal_before < n_equal_wanted));
    const int taken_before = block_count_before(is_taken, warp_counts, &taken_total);
    if (is_taken) entries[n_out + taken_before] = static_cast<int32_t>(j);
    n_equal += equal_total;
    n_out += taken_total;
  }
  if (threadIdx.x == 0) p.n_selected[t] = n_out;
}

// best[b] of every block of a row; the last used one is always kept. lengths: [0] first score of the row's bests, [1] used blocks.
__global__ __launch_bounds__(kRowThreads) void block_best_kernel(SelectBlocksParams p) {
  const int64_t t = blockIdx.y, n = p.n[t], used = (n + p.block_size - 1) / p.block_size;
  const float* scores = p.scores + p.begin[t];
  for (int64_t b = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; b < p.n_blocks; b += int64_t{gridDim.x} * blockDim.x) {
    float best = -INFINITY;
    const int64_t end = (b + 1) * p.block_size < n ? (b + 1) * p.block_size : n;
    for (int64_t j = b * p.block_size; j < end; ++j) best = scores[j] > best ? scores[j] : best;
    if (b == used - 1) best = INFINITY;
    p.best[t * p.n_blocks + b] = best;
    p.mask[t * p.n_blocks + b] = 0;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    p.lengths[t] = t * p.n_blocks;
    p.lengths[p.n_rows + t] = used;
  }
}

__global__ __launch_bounds__(kRowThreads) void block_mask_kernel(SelectBlocksParams p) {
  const int64_t t = blockIdx.x, n = p.lengths[2 * p.n_rows + t];
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    const int64_t at = t * p.n_blocks + p.chosen[t * p.n_blocks + i];
    p.mask[at] = p.best[at] > -INFINITY ? 1 : 0;
  }
}

}  // namespace

Status router(device::Stream& stream, const RouterParams& p) {
  if (p.n_rows == 0) return ok_status();
  if (p.n_active < 1 || p.n_active > p.n_experts) {
    return invalid_argument("router: expected 1 to " + std::to_string(p.n_experts) + " active experts, found " + std::to_string(p.n_active));
  }
  const size_t shared = static_cast<size_t>(p.n_experts + p.n_active) * sizeof(float);
  RETURN_IF_ERROR(allow_shared_memory(stream, router_kernel, shared, "router"));
  router_kernel<<<static_cast<unsigned>(p.n_rows), kRowThreads, shared, stream.handle()>>>(p);
  return stream.launched("router_kernel");
}

Status index_scores(device::Stream& stream, const IndexScoresParams& p, int64_t max_visible) {
  if (p.n_rows == 0 || max_visible == 0) return ok_status();
  if (p.n_rows > 65535) return invalid_argument("index_scores: expected at most 65535 rows, found " + std::to_string(p.n_rows));
  const size_t shared = static_cast<size_t>(p.n_heads * p.dim) * sizeof(float);
  RETURN_IF_ERROR(allow_shared_memory(stream, index_scores_kernel, shared, "index_scores"));
  const dim3 grid(grid_for(max_visible, kRowThreads), static_cast<unsigned>(p.n_rows));
  index_scores_kernel<<<grid, kRowThreads, shared, stream.handle()>>>(p);
  return stream.launched("index_scores_kernel");
}

Status set_index_keys(device::Stream& stream, const float* keys, int64_t n, int64_t dim, int64_t first, float* panels) {
  if (n * dim == 0) return ok_status();
  set_index_keys_kernel<<<grid_for(n * dim, kRowThreads), kRowThreads, 0, stream.handle()>>>(keys, n, dim, first, panels);
  return stream.launched("set_index_keys_kernel");
}

Status select_top_k(device::Stream& stream, const SelectParams& p) {
  if (p.n_rows == 0) return ok_status();
  select_top_k_kernel<<<static_cast<unsigned>(p.n_rows), kSelectThreads, 0, stream.handle()>>>(p);
  return stream.launched("select_top_k_kernel");
}

Status select_blocks(device::Stream& stream, const SelectBlocksParams& p) {
  if (p.n_rows == 0 || p.n_blocks == 0) return ok_status();
  if (p.n_rows > 65535) return invalid_argument("select_blocks: expected at most 65535 rows, found " + std::to_string(p.n_rows));
  const dim3 grid(grid_for(p.n_blocks, kRowThreads), static_cast<unsigned>(p.n_rows));
  block_best_kernel<<<grid, kRowThreads, 0, stream.handle()>>>(p);
  RETURN_IF_ERROR(stream.launched("block_best_kernel"));
  SelectParams select;
  select.scores = p.best;
  select.begin = p.lengths;
  select.n = p.lengths + p.n_rows;
  select.k = p.k;
  select.entries = p.chosen;
  select.entries_stride = p.n_blocks;
  select.n_selected = p.lengths + 2 * p.n_rows;
  select.n_rows = p.n_rows;
  RETURN_IF_ERROR(select_top_k(stream, select));
  block_mask_kernel<<<static_cast<unsigned>(p.n_rows), kRowThreads, 0, stream.handle()>>>(p);
  return stream.launched("block_mask_kernel");
}

}  // namespace espalier::ops::cuda
