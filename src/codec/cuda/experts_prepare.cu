// What comes before the large launches: the plan, and the rotation and quantization of the input.
#include "base/check.h"
#include "codec/cuda/experts_plan.cuh"
#include "device/cuda_status.cuh"

namespace espalier::codec::cuda {
namespace {

constexpr int kPlanThreads = 512;
constexpr int kRotateWarps = 20, kRotateChunks = 7;  // of a block; of a warp at most: d_model up to 16384

// Starts of a line's jobs, by one warp; cost[j] is replaced by job j's start. Writes the line's head to `line`.
template <int kMaxJobs>
__device__ void lay_out(int* cost, int n_jobs, int pairs, int n_warps, int lane, Line<kMaxJobs>* line, int* total_and_quota) {
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
  dearest = __reduce_max_sync(0xFFFFFFFFu, dearest);
  if (lane == 0) {
    total_and_quota[0] = total;
    total_and_quota[1] = max(ceil_div(total, n_warps), kMinPairs * static_cast<int>(dearest));
    if (line != nullptr) line->n_jobs = n_jobs, line->quota = total_and_quota[1];
  }
}

// A job as the plan's blocks keep it.
struct PlannedJob {
  const uint32_t* blocks;
  int k2, cost, entry;
};

// Where warp `w` starts on a line: the first pair that begins in its part, and what follows up to the part's end.
__device__ Start start_of(const PlannedJob* jobs, const int* starts, int n_jobs, int pairs, int n_pairs, int total, int quota, int w) {
  const int low = w * quota, high = low + quota;
  Start out = {};
  out.job = -1;
  if (low >= total) return out;
  int j = 0, above = n_jobs;
  while (above - j > 1) {
    const int middle = (j + above) / 2;
    (starts[middle] <= low ? j : above) = middle;
  }
  int begin = ceil_div(low - starts[j], jobs[j].cost);
  if (begin >= pairs) {
    if (++j == n_jobs || starts[j] >= high) return out;
    begin = 0;
  }
  int last = j;
  while (last + 1 < n_jobs && starts[last + 1] < high) ++last;
  const int last_end = min(pairs, ceil_div(high - starts[last], jobs[last].cost));
  if (last == j && last_end <= begin) return out;
  const int n_groups = pairs / n_pairs;
  out.blocks = jobs[j].blocks;
  out.job = j;
  out.begin = begin;
  out.end = last == j ? last_end : pairs;
  out.k2 = jobs[j].k2;
  out.first = j * n_groups + begin / n_pairs;
  out.last = last * n_groups + (last_end - 1) / n_pairs;
  out.last_pairs = (last_end - 1) % n_pairs + 1;
  out.first_pairs = n_pairs - begin % n_pairs;
  if (out.first == out.last) out.first_pairs = out.last_pairs = out.first_pairs + out.last_pairs - n_pairs;
  return out;
}

// Slots of one expert, in slot order, fill entries of four rows; entries are in order of expert. Every block makes the whole plan for
// itself and writes its share of the starts; the first also writes the plan.
__global__ __launch_bounds__(kPlanThreads) void plan_experts_kernel(ExpertsArguments a) {
  __shared__ int ids[kMaxSlots], begins_entry[kMaxSlots], n_entries;
  __shared__ int expert_of[kMaxSlots], rows_of[kMaxSlots], slots_of[kMaxSlots][kSetRows];
  __shared__ int up_cost[2 * kMaxSlots], down_cost[kMaxSlots], up_total[2], down_total[2];
  __shared__ PlannedJob up_jobs[2 * kMaxSlots], down_jobs[kMaxSlots];
  const int t = threadIdx.x, n = a.n_slots;
  const bool is_first = blockIdx.x == 0;
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
    if (is_first) {
      const ExpertMatrices& m = a.experts[ids[t]];
      plan.slot_suh[t][0] = m.gate.suh;
      plan.slot_suh[t][1] = m.up.suh;
    }
  }
  __syncthreads();
  if (t < 3 * n_entries) {  // one thread per matrix
    const int e = t / 3, which = t % 3;
    const ExpertMatrices& m = a.experts[expert_of[e]];
    const DeviceMatrix& matrix = which == 0 ? m.gate : which == 1 ? m.up : m.down;
    const int cost = pair_cost(matrix.k2);
    (which == 2 ? down_jobs[e] : up_jobs[2 * e + which]) = {matrix.blocks, matrix.k2, cost, e};
    (which == 2 ? down_cost[e] : up_cost[2 * e + which]) = cost;
    Job& job = which == 2 ? plan.down.jobs[e] : plan.up.jobs[2 * e + which];
    if (is_first) {
      job.blocks = matrix.blocks;
      job.k2 = matrix.k2;
      job.cost = cost;
      job.n_rows = rows_of[e];
      for (int r = 0; r < kSetRows; ++r) job.slots[r] = slots_of[e][r < rows_of[e] ? r : 0];  // missing rows repeat the first
    }
    if (is_first && which == 2) {
      Entry& entry = plan.entries[e];
      entry.expert = expert_of[e];
      entry.n_rows = rows_of[e];
      for (int r = 0; r < kSetRows; ++r) entry.slots[r] = slots_of[e][r < rows_of[e] ? r : 0];
      entry.gate_svh = m.gate.svh;
      entry.up_svh = m.up.svh;
      entry.down_suh = m.down.suh;
      entry.down_svh = m.down.svh;
    }
  }
  __syncthreads();
  const int up_pairs = a.d_model / kPairRows * (a.d_ff / kGroupColumns), down_pairs = a.d_ff / kPairRows * (a.d_model / kGroupColumns);
  if (t < 32) lay_out(up_cost, 2 * n_entries, up_pairs, a.n_warps, t, is_first ? &plan.up : nullptr, up_total);
  if (t >= 32 && t < 64) lay_out(down_cost, n_entries, down_pairs, a.n_warps, t - 32, is_first ? &plan.down : nullptr, down_total);
  __syncthreads();
  if (is_first && t < 2 * n_entries) plan.up.jobs[t].start = up_cost[t];
  if (is_first && t < n_entries) plan.down.jobs[t].start = down_cost[t];
  const int index = static_cast<int>(blockIdx.x) * kPlanThreads + t;
  if (index >= 2 * a.n_warps) return;
  const bool is_down = index >= a.n_warps;
  const PlannedJob* jobs = is_down ? down_jobs : up_jobs;
  Start start = is_down ? start_of(jobs, down_cost, n_entries, down_pairs, a.d_ff / kPairRows, down_total[0], down_total[1], index - a.n_warps)
                        : start_of(jobs, up_cost, 2 * n_entries, up_pairs, a.d_model / kPairRows, up_total[0], up_total[1], index);
  if (start.job >= 0) {
    const int e = jobs[start.job].entry;
    start.n_rows = rows_of[e];
    for (int r = 0; r < kSetRows; ++r) start.slots[r] = slots_of[e][r < rows_of[e] ? r : 0];
  }
  a.starts[index] = start;
}

// A block per (slot, gate or up): rotates the token's row with that expert's suh, finds the row's scale, writes its digits.
__global__ __launch_bounds__(32 * kRotateWarps) void rotate_tokens_kernel(const __grid_constant__ ExpertsArguments a) {
  __shared__ float largest[kRotateWarps];
  __shared__ int sums[kRotateWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_chunks = a.d_model / kChunk;
  const int slot = blockIdx.x / 2, projection = blockIdx.x % 2;
  wait_for_previous_kernel();
  let_next_kernel_start();  // not before: the next kernel raises counters that the call before this one may still use
  const uint16_t* suh = a.plan->slot_suh[slot][projection];
  const float* x = a.x + int64_t{slot / a.n_active} * a.d_model;
  float4 v4[kRotateChunks], s4[kRotateChunks];
#pragma unroll
  for (int i = 0; i < kRotateChunks; ++i) {
    const int c = warp + i * kRotateWarps;
    if (c < n_chunks) v4[i] = *(reinterpret_cast<const float4*>(x + c * kChunk) + lane);
  }
#pragma unroll
  for (int i = 0; i < kRotateChunks; ++i) {
    const int c = warp + i * kRotateWarps;
    if (c < n_chunks) s4[i] = load_scales(suh + c * kChunk, lane);
  }
  float v[kRotateChunks][4], mine = 0;
#pragma unroll
  for (int i = 0; i < kRotateChunks; ++i) {
    if (warp + i * kRotateWarps >= n_chunks) break;
    v[i][0] = v4[i].x * s4[i].x, v[i][1] = v4[i].y * s4[i].y, v[i][2] = v4[i].z * s4[i].z, v[i][3] = v4[i].w * s4[i].w;
    rotate_chunk(v[i], lane);
    const float chunk_largest = chunk_max(v[i]);
    mine = chunk_largest < INFINITY ? fmaxf(mine, chunk_largest) : INFINITY;  // NaN counts as infinite
  }
  if (lane == 0) largest[warp] = mine;
  __syncthreads();
  float scale = 0;
#pragma unroll
  for (int w = 0; w < kRotateWarps; ++w) scale = fmaxf(scale, largest[w]);
  const float per_unit = scale > 0 ? 127.0f / scale : 0.0f;
  uint8_t* to = a.model_digits + int64_t{blockIdx.x} * n_chunks * kChunkBytes;
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kRotateChunks; ++i) {
    const int c = warp + i * kRotateWarps;
    if (c >= n_chunks) break;
    const Digits digits = digits_of(v[i], per_unit);
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
  const ExpertsArguments a = experts_arguments(table, p, scratch);
  plan_experts_kernel<<<static_cast<unsigned>((2 * a.n_warps + kPlanThreads - 1) / kPlanThreads), kPlanThreads, 0, stream.handle()>>>(a);
  return stream.launched("plan_experts_kernel");
}

Status rotate_tokens(device::Stream& stream, const ExpertsArguments& a, bool has_dependent_launch) {
  CHECK(a.d_model <= kRotateWarps * kRotateChunks * kChunk) << a.d_model;
  cudaLaunchAttribute dependent = {};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(2 * a.n_slots));
  config.blockDim = dim3(32 * kRotateWarps);
  config.stream = stream.handle();
  config.attrs = &dependent;
  config.numAttrs = has_dependent_launch ? 1 : 0;
  cudaLaunchKernelEx(&config, rotate_tokens_kernel, a);
  return stream.launched("rotate_tokens_kernel");
}

}  // namespace espalier::codec::cuda
