#include "ops/cuda/lanes.cuh"
#include "ops/cuda/selection.h"
#include "ops/cuda/shared_memory.cuh"
#include "ops/scalar_math.h"

namespace espalier::ops::cuda {
namespace {

struct Best {
  float score;
  int index;  // -1: none
};

__device__ __forceinline__ bool is_better(const Best& a, const Best& b) {
  if (a.index < 0) return false;
  if (b.index < 0) return true;
  return a.score != b.score ? a.score > b.score : a.index < b.index;
}

constexpr int kRouterThreads = 512;
constexpr int kLaneExperts = 16;  // of a lane, for up to 512 experts

// Warp 0: k <= 32 rounds of "the best one not taken yet" over biased[0, n); lane l looks at experts l, l + 32, .. chosen: ascending.
__device__ __forceinline__ void choose_experts(const float* biased, int n, int k, int* chosen) {
  constexpr unsigned kAll = 0xFFFFFFFFu;
  const int lane = static_cast<int>(threadIdx.x);
  uint32_t ranks[kLaneExperts];  // 0: not there, or taken
#pragma unroll
  for (int i = 0; i < kLaneExperts; ++i) ranks[i] = lane + 32 * i < n ? rank_of(biased[lane + 32 * i]) : 0;
  int mine = 0;  // lane r: the one of round r
  for (int round = 0; round < k; ++round) {
    uint32_t best = ranks[0];
    int at = 0;
#pragma unroll
    for (int i = 1; i < kLaneExperts; ++i) {
      if (ranks[i] > best) best = ranks[i], at = i;
    }
    const uint32_t top = __reduce_max_sync(kAll, best);
    const int index = __reduce_min_sync(kAll, best == top ? lane + 32 * at : 0x7FFFFFFF);
#pragma unroll
    for (int i = 0; i < kLaneExperts; ++i) {
      if (lane + 32 * i == index) ranks[i] = 0;
    }
    if (lane == round) mine = index;
  }
  int place = 0;
  for (int j = 0; j < k; ++j) place += __shfl_sync(kAll, mine, j) < mine ? 1 : 0;
  if (lane < k) chosen[place] = mine;
}

// A block per row: scores of all experts, then n_active rounds of "the best one not taken yet".
__global__ __launch_bounds__(kRouterThreads) void router_kernel(RouterParams p) {
  extern __shared__ float biased[];  // [n_experts] scores, [n_active] chosen ids as ints, [n_experts] scores without bias
  const int n = static_cast<int>(p.n_experts), k = static_cast<int>(p.n_active);
  int* chosen = reinterpret_cast<int*>(biased + n);
  float* scores = biased + n + k;
  __shared__ Best warp_best[kRouterThreads / 32];
  const int64_t t = blockIdx.x;
  for (int e = static_cast<int>(threadIdx.x); e < n; e += kRouterThreads) {
    const float logit = p.logits[t * n + e] / p.temperature;
    const float score = static_cast<float>(sqrt(softplus_d(static_cast<double>(logit))));
    scores[e] = score;
    p.scores[t * n + e] = score;
    const float sum = score + p.bias[e];
    biased[e] = isnan(sum) ? -INFINITY : sum;
  }
  __syncthreads();
  if (n <= 32 * kLaneExperts && k <= 32) {
    if (threadIdx.x >= 32) return;
    choose_experts(biased, n, k, chosen);
    __syncwarp();
    float sum = 0;
    for (int i = 0; i < k; ++i) sum += scores[chosen[i]];
    const int i = static_cast<int>(threadIdx.x);
    if (i >= k) return;
    p.ids[t * k + i] = chosen[i];
    p.weights[t * k + i] = scores[chosen[i]] / (sum + 1e-20f) * p.scale;
    return;
  } else {
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
    for (int round = 0; round < k; ++round) {
      __syncthreads();
      Best best = {0, -1};
      for (int e = static_cast<int>(threadIdx.x); e < n; e += kRouterThreads) {
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
        for (int i = 1; i < kRouterThreads / 32; ++i) {
          if (is_better(warp_best[i], best)) best = warp_best[i];
        }
        chosen[round] = best.index;
      }
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

}  // namespace

Status router(device::Stream& stream, const RouterParams& p) {
  if (p.n_rows == 0) return ok_status();
  if (p.n_active < 1 || p.n_active > p.n_experts) {
    return invalid_argument("router: expected 1 to " + std::to_string(p.n_experts) + " active experts, found " + std::to_string(p.n_active));
  }
  const size_t shared = static_cast<size_t>(2 * p.n_experts + p.n_active) * sizeof(float);
  RETURN_IF_ERROR(allow_shared_memory(stream, router_kernel, shared, "router"));
  router_kernel<<<static_cast<unsigned>(p.n_rows), kRouterThreads, shared, stream.handle()>>>(p);
  return stream.launched("router_kernel");
}

}  // namespace espalier::ops::cuda
