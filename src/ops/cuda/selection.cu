#include "ops/cuda/selection.h"

#include "ops/cuda/lanes.cuh"

namespace espalier::ops::cuda {
namespace {

constexpr int kSelectThreads = 1024;
constexpr int kSelectWarps = kSelectThreads / 32;

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

constexpr int kKept = 8;            // ranks that a thread keeps in registers: those of the first kKept * kSelectThreads scores
constexpr int kHistograms = 4;      // copies of a bin, by lane: most scores of a row share their top byte
constexpr int kKeptChunks = kKept * kSelectWarps;  // of 32 scores

// A block per row. Four passes over the scores find the rank of the k-th best, byte by byte from the top, by counting; then what is above
// it is written, and of its equals the first ones, in ascending order of index. Counts are integers, so the atomics are exact.
__global__ __launch_bounds__(kSelectThreads) void select_top_k_kernel(SelectParams p) {
  __shared__ __align__(16) int histogram[256 * kHistograms];
  __shared__ int warp_counts[kSelectWarps];
  __shared__ uint32_t chunk_counts[kKeptChunks];  // equals in the upper half, those above in the lower one
  __shared__ uint32_t kept_counts;
  __shared__ uint32_t shared_prefix;
  __shared__ int64_t shared_left;
  __shared__ bool shared_all;
  const int64_t t = blockIdx.x, n = p.n[t];
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const float* scores = p.scores + p.begin[t];
  const uint8_t* allowed = p.allowed != nullptr ? p.allowed + t * p.allowed_stride : nullptr;
  const uint32_t block_size = static_cast<uint32_t>(p.block_size);
  // 0 where there is nothing to take. Indices fit 31 bits, as the entries do.
  const auto rank_at = [&](int64_t j) {
    if (j >= n || (allowed != nullptr && allowed[static_cast<uint32_t>(j) / block_size] == 0)) return 0u;
    return rank_of(scores[j]);
  };
  uint32_t kept[kKept];
#pragma unroll
  for (int i = 0; i < kKept; ++i) kept[i] = rank_at(threadIdx.x + i * kSelectThreads);
  if (threadIdx.x == 0) {
    shared_prefix = 0;
    shared_left = p.k;
    shared_all = false;
  }
  for (int pass = 0; pass < 4; ++pass) {
    const int shift = 24 - 8 * pass;
    histogram[threadIdx.x] = 0;
    static_assert(256 * kHistograms == kSelectThreads);
    __syncthreads();
    const uint32_t prefix = shared_prefix;
    const auto count = [&](uint32_t rank) {
      if (rank == 0 || (pass > 0 && (rank >> (shift + 8)) != (prefix >> (shift + 8)))) return;
      atomicAdd(&histogram[((rank >> shift) & 255u) * kHistograms + lane % kHistograms], 1);
    };
#pragma unroll
    for (int i = 0; i < kKept; ++i) count(kept[i]);
    for (int64_t j = int64_t{kKept} * kSelectThreads + threadIdx.x; j < n; j += kSelectThreads) count(rank_at(j));
    __syncthreads();
    // Warp 0 finds the bin of the k-th best: lane l has the eight bins below 256 - 8 l.
    if (warp == 0) {
      const int top = 255 - 8 * lane;
      const int64_t wanted = shared_left;
      int bins[8];
      int64_t mine = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int4 of = *reinterpret_cast<const int4*>(histogram + (top - i) * kHistograms);
        bins[i] = of.x + of.y + of.z + of.w;
        mine += bins[i];
      }
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
        bool is_found = false;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          is_found = is_found || bins[i] >= left;
          if (!is_found) left -= bins[i], --bin;
        }
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
  const unsigned before = (1u << lane) - 1;
  int32_t* entries = p.entries + t * p.entries_stride;
  const auto is_above = [&](uint32_t rank) { return rank != 0 && (takes_all || rank > threshold); };
  const auto is_equal = [&](uint32_t rank) { return !takes_all && rank == threshold; };
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const unsigned above = __ballot_sync(0xFFFFFFFFu, is_above(kept[i])), equal = __ballot_sync(0xFFFFFFFFu, is_equal(kept[i]));
    if (lane == 0) chunk_counts[i * kSelectWarps + warp] = static_cast<uint32_t>(__popc(equal)) << 16 | static_cast<uint32_t>(__popc(above));
  }
  __syncthreads();
  if (warp == 0) {  // exclusive sums over the chunks, eight a lane
    uint32_t sums[kKept], mine = 0;
#pragma unroll
    for (int i = 0; i < kKept; ++i) sums[i] = mine, mine += chunk_counts[lane * kKept + i];
    uint32_t through = mine;
#pragma unroll
    for (int w = 1; w < 32; w *= 2) {
      const uint32_t above = __shfl_up_sync(0xFFFFFFFFu, through, w);
      if (lane >= w) through += above;
    }
#pragma unroll
    for (int i = 0; i < kKept; ++i) chunk_counts[lane * kKept + i] = sums[i] + through - mine;
    if (lane == 31) kept_counts = through;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const bool above = is_above(kept[i]), equal = is_equal(kept[i]);
    const uint32_t counts = chunk_counts[i * kSelectWarps + warp];
    const int64_t n_equal = int64_t{counts >> 16} + __popc(__ballot_sync(0xFFFFFFFFu, equal) & before);
    const int64_t n_above = int64_t{counts & 0xFFFFu} + __popc(__ballot_sync(0xFFFFFFFFu, above) & before);
    if (above || (equal && n_equal < n_equal_wanted)) {
      entries[n_above + (n_equal < n_equal_wanted ? n_equal : n_equal_wanted)] = static_cast<int32_t>(threadIdx.x + i * kSelectThreads);
    }
  }
  int64_t n_equal = kept_counts >> 16, n_out = (kept_counts & 0xFFFFu) + (n_equal < n_equal_wanted ? n_equal : n_equal_wanted);
  for (int64_t begin = int64_t{kKept} * kSelectThreads; begin < n; begin += kSelectThreads) {
    const int64_t j = begin + threadIdx.x;
    const uint32_t rank = rank_at(j);
    int equal_total, taken_total;
    const int equal_before = block_count_before(is_equal(rank), warp_counts, &equal_total);
    const bool is_taken = is_above(rank) || (is_equal(rank) && n_equal + equal_before < n_equal_wanted);
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
