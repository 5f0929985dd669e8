#include "ops/cuda/selection.h"

#include "ops/cuda/lanes.cuh"

namespace espalier::ops::cuda {
namespace {

constexpr int kSelectThreads = 1024;
constexpr int kSelectWarps = kSelectThreads / 32;

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
    // Warp 0 finds the bin of the k-th best: lane l has the eight bins below 256 - 8 l.
    if (threadIdx.x < 32) {
      const int lane = static_cast<int>(threadIdx.x), top = 255 - 8 * lane;
      const int64_t wanted = shared_left;
      int64_t mine = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) mine += histogram[top - i];
      int64_t through = mine;  // in this lane's bins and those above
#pragma unroll
      for (int w = 1; w < 32; w *= 2) {
        const int64_t above = __shfl_up_sync(0xFFFFFFFFu, through, w);
        if (lane >= w) through += above;
      }
      const unsigned reached = __ballot_sync(0xFFFFFFFFu, through >= wanted);
      if (reached == 0) {
        if (lane == 0) shared_all = true;  // only in the first pass: fewer are allowed than asked for
      } else if (lane == __ffs(static_cast<int>(reached)) - 1) {
        int64_t left = wanted - (through - mine);
        int bin = top;
        for (; histogram[bin] < left; --bin) left -= histogram[bin];
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
