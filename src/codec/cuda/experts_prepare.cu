// What comes before the large launches: the plan, and the rotation and quantization of the input.
#include "codec/cuda/experts_plan.cuh"
#include "device/cuda_status.cuh"

namespace espalier::codec::cuda {
namespace {

constexpr int kPlanThreads = 512;
constexpr int kRotateWarps = 20;

// Starts of a line's jobs, by one warp; cost[j] is replaced by job j's start. Writes the line's head to `line`.
template <int kMaxJobs>
__device__ void lay_out(int* cost, int n_jobs, int pairs, int n_warps, int lane, Line<kMaxJobs>& line, int* total_and_quota) {
  constexpr int kEach = kMaxJobs / 32;
  int mine[kEach], sum = 0, dearest = 1;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int j = kEach * lane + i;
    mine[i] = j < n_jobs ? cost[j] : 0;
    dearest = max(dearest, mine[i]);
    sum += mine[i];
  }
  int before = sum;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFFu, before, distance);
    if (lane >= distance) before += other;
  }
  const int total = __shfl_sync(0xFFFFFFFFu, before, 31) * pairs;
  before -= sum;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    cost[kEach * lane + i] = before * pairs;
    before += mine[i];
  }
  if (lane == 0) {
    line.n_jobs = n_jobs;
    total_and_quota[0] = total;
    line.quota = total_and_quota[1] = max(ceil_div(total, n_warps), kMinPairs * static_cast<int>(__reduce_max_sync(1u, dearest)));
  }
}

// The last job that starts at or before the warp's part of the line, and its first pair there.
__device__ __forceinline__ Beginning beginning_of(const int* starts, const Job* jobs, int n_jobs, int pairs, int total, int low) {
  if (low >= total) return {-1, 0};
  int j = 0, above = n_jobs;
  while (above - j > 1) {
    const int middle = (j + above) / 2;
    (starts[middle] <= low ? j : above) = middle;
  }
  const int pair = ceil_div(low - starts[j], jobs[j].cost);
  if (pair < pairs) return {j, pair};
  return j + 1 < n_jobs ? Beginning{j + 1, 0} : Beginning{-1, 0};
}

// Slots of one expert, in slot order, fill entries of four rows; entries are in order of expert.
__global__ __launch_bounds__(kPlanThreads) void plan_experts_kernel(ExpertsArguments a) {
  __shared__ int ids[kMaxSlots], begins_entry[kMaxSlots], n_entries;
  __shared__ int expert_of[kMaxSlots], rows_of[kMaxSlots], slots_of[kMaxSlots][kSetRows];
  __shared__ int up_cost[2 * kMaxSlots], down_cost[kMaxSlots], up_total[2], down_total[2];
  const int t = threadIdx.x, n = a.n_slots;
  ExpertsPlan& plan = *a.plan;
  if (t < n) ids[t] = a.ids[t];
  if (t == 0) n_entries = 0;
  __syncthreads();
  int rank = 0, total = 0;
  if (t < n) {
    for (int s = 0; s < n; ++s) {
      const bool same = ids[s] == ids[t];
      rank += same && s < t ? 1 : 0;
      total += same ? 1 : 0;
    }
    begins_entry[t] = rank % kSetRows == 0 ? 1 : 0;
  }
  __syncthreads();
  if (t < n) {
    int entry = rank / kSetRows;
    for (int s = 0; s < n; ++s) entry += ids[s] < ids[t] ? begins_entry[s] : 0;
    slots_of[entry][rank % kSetRows] = t;
    if (rank % kSetRows == 0) {
      expert_of[entry] = ids[t];
      rows_of[entry] = min(kSetRows, total - rank);
      atomicAdd(&n_entries, 1);
    }
    const ExpertMatrices& m = a.experts[ids[t]];
    plan.slot_suh[t][0] = m.gate.suh;
    plan.slot_suh[t][1] = m.up.suh;
  }
  __syncthreads();
  if (t < 3 * n_entries) {  // one thread per matrix
    const int e = t / 3, which = t % 3;
    const ExpertMatrices& m = a.experts[expert_of[e]];
    const DeviceMatrix& matrix = which == 0 ? m.gate : which == 1 ? m.up : m.down;
    Job& job = which == 2 ? plan.down.jobs[e] : plan.up.jobs[2 * e + which];
    job.blocks = matrix.blocks;
    job.k2 = matrix.k2;
    job.cost = pair_cost(matrix.k2);
    job.n_rows = rows_of[e];
    for (int r = 0; r < kSetRows; ++r) job.slots[r] = slots_of[e][r < rows_of[e] ? r : 0];  // missing rows repeat the first
    (which == 2 ? down_cost[e] : up_cost[2 * e + which]) = job.cost;
    if (which == 2) {
      Entry& entry = plan.entries[e];
      entry.expert = expert_of[e];
      entry.n_rows = rows_of[e];
      for (int r = 0; r < kSetRows; ++r) entry.slots[r] = job.slots[r];
      entry.gate_svh = m.gate.svh;
      entry.up_svh = m.up.svh;
      entry.down_suh = m.down.suh;
      entry.down_svh = m.down.svh;
    }
  }
  __syncthreads();
  const int up_pairs = a.d_model / kPairRows * (a.d_ff / kGroupColumns), down_pairs = a.d_ff / kPairRows * (a.d_model / kGroupColumns);
  if (t < 32) lay_out(up_cost, 2 * n_entries, up_pairs, a.n_warps, t, plan.up, up_total);
  if (t >= 32 && t < 64) lay_out(down_cost, n_entries, down_pairs, a.n_warps, t - 32, plan.down, down_total);
  __syncthreads();
  if (t < 2 * n_entries) plan.up.jobs[t].start = up_cost[t];
  if (t < n_entries) plan.down.jobs[t].start = down_cost[t];
  for (int w = t; w < a.n_warps; w += kPlanThreads) {
    a.beginnings[w] = beginning_of(up_cost, plan.up.jobs, 2 * n_entries, up_pairs, up_total[0], w * up_total[1]);
    a.beginnings[a.n_warps + w] = beginning_of(down_cost, plan.down.jobs, n_entries, down_pairs, down_total[0], w * down_total[1]);
  }
}

// A block per (slot, gate or up): rotates the token's row with that expert's suh, finds the row's scale, writes its digits.
__global__ __launch_bounds__(32 * kRotateWarps) void rotate_tokens_kernel(ExpertsArguments a) {
  extern __shared__ float4 rotated[];  // [d_model/4]
  __shared__ float largest[kRotateWarps];
  __shared__ int sums[kRotateWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_chunks = a.d_model / kChunk;
  const int slot = blockIdx.x / 2, projection = blockIdx.x % 2;
  const uint16_t* suh = a.plan->slot_suh[slot][projection];
  const float* x = a.x + int64_t{slot / a.n_active} * a.d_model;
  let_next_kernel_start();
  float mine = 0;
  for (int c = warp; c < n_chunks; c += kRotateWarps) {
    const float4 in = __ldg(reinterpret_cast<const float4*>(x + c * kChunk) + lane);
    const float4 s = load_scales(suh + c * kChunk, lane);
    float v[4] = {in.x * s.x, in.y * s.y, in.z * s.z, in.w * s.w};
    rotate_chunk(v, lane);
    const float chunk_largest = chunk_max(v);
    mine = chunk_largest < INFINITY ? fmaxf(mine, chunk_largest) : INFINITY;  // NaN counts as infinite
    rotated[c * 32 + lane] = {v[0], v[1], v[2], v[3]};
  }
  if (lane == 0) largest[warp] = mine;
  __syncthreads();
  float scale = 0;
#pragma unroll
  for (int w = 0; w < kRotateWarps; ++w) scale = fmaxf(scale, largest[w]);
  const float per_unit = scale > 0 ? 127.0f / scale : 0.0f;
  uint8_t* to = a.model_digits + int64_t{blockIdx.x} * n_chunks * kChunkBytes;
  int sum = 0;
  for (int c = warp; c < n_chunks; c += kRotateWarps) {
    const float4 in = rotated[c * 32 + lane];
    const float v[4] = {in.x, in.y, in.z, in.w};
    const Digits digits = digits_of(v, per_unit);
    store_digits(digits, lane, to + c * kChunkBytes);
    sum += kResidualUnits * digits.sum_main + digits.sum_residual;
  }
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    int total = 0;
    for (int w = 0; w < kRotateWarps; ++w) total += sums[w];
    a.model_scales[blockIdx.x] = {scale == INFINITY ? NAN : scale / 127.0f, total};
  }
}

}  // namespace

Status plan_experts(device::Stream& stream, const ExpertTable& table, const ExpertsParams& p, ExpertsScratch& scratch) {
  RETURN_IF_ERROR(check_experts(table, p, scratch));
  plan_experts_kernel<<<1, kPlanThreads, 0, stream.handle()>>>(experts_arguments(table, p, scratch));
  return stream.launched("plan_experts_kernel");
}

Status rotate_tokens(device::Stream& stream, const ExpertsArguments& a) {
  const int shared = a.d_model * static_cast<int>(sizeof(float));
  ESPALIER_CUDA_TRY("experts", cudaFuncSetAttribute(rotate_tokens_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  rotate_tokens_kernel<<<static_cast<unsigned>(2 * a.n_slots), 32 * kRotateWarps, shared, stream.handle()>>>(a);
  return stream.launched("rotate_tokens_kernel");
}

}  // namespace espalier::codec::cuda
