#include "codec/cuda/experts.h"

#include "codec/cuda/experts_finish.cuh"
#include "codec/cuda/experts_plan.cuh"
#include "codec/cuda/experts_stream.cuh"
#include "device/cuda_status.cuh"
#include "device/device.h"

namespace espalier::codec::cuda {
namespace {

constexpr int kWarps = 8;  // of a block
constexpr int kBlocksPerSm = 2;

// Gate and up, or down. A warp streams its part of the line, then announces what it has added; the last to arrive at 128 columns of an
// entry finishes them.
template <bool kDown>
__global__ __launch_bounds__(32 * kWarps, kBlocksPerSm) void experts_kernel(ExpertsArguments a) {
  extern __shared__ __align__(16) uint8_t rings[];
  const int lane = threadIdx.x % 32, warp = blockIdx.x * kWarps + threadIdx.x / 32;
  const int k = kDown ? a.d_ff : a.d_model, n = kDown ? a.d_model : a.d_ff;
  const int n_pairs = k / kPairRows, n_groups = n / kGroupColumns;
  const Beginning begin = a.beginnings[kDown ? a.n_warps + warp : warp];
  const int n_jobs = kDown ? a.plan->down.n_jobs : a.plan->up.n_jobs, quota = kDown ? a.plan->down.quota : a.plan->up.quota;
  const Job* jobs = kDown ? a.plan->down.jobs : a.plan->up.jobs;
  let_next_kernel_start();
  if (begin.job < 0) return wait_for_previous_kernel();  // every warp waits, so that the next kernel finds this one and its predecessor done

  Added added;
  const int end = (warp + 1) * quota;
  uint8_t* ring = rings + threadIdx.x / 32 * kRingBytes;
#pragma unroll 1
  for (int j = begin.job; j < n_jobs; ++j) {
    const Job& job = jobs[j];
    const int start = job.start;
    if (start >= end) break;
    Stretch s;
    s.blocks = job.blocks;
    s.begin = j == begin.job ? begin.pair : 0;
    s.end = min(n_pairs * n_groups, ceil_div(end - start, job.cost));
    s.n_pairs = n_pairs;
    s.n_rows = job.n_rows;
    s.part = warp + j * n_groups;
    const int slot = job.slots[lane / 4 % kSetRows];
    const int64_t row = kDown ? slot : 2 * slot + j % 2;
    s.digits = (kDown ? a.ff_digits : a.model_digits) + row * (k / kChunk) * kChunkBytes + lane % 4 * 16;
    s.scales = a.ff_scales + int64_t{job.slots[lane % kSetRows]} * (k / kChunk);
    if (s.begin < s.end) stream_any_width<kDown>(a, s, job.k2, lane, ring, j * n_groups, added);
  }

  if (added.first < 0) return;
  // One fence for all parts, then the arrivals: lane i tells about the i-th column group.
  __threadfence();
  __syncwarp();
  uint32_t* arrivals = kDown ? a.down_arrivals : a.up_arrivals;
  for (int g = added.first; g <= added.last; g += 32) {
    const int mine = g + lane;
    bool is_last = false;
    int entry = 0, block = 0;
    if (mine <= added.last) {
      const int job = mine / n_groups;
      entry = kDown ? job : job / 2;
      block = (mine - job * n_groups) / 2;
      const uint32_t count = mine == added.first ? added.first_pairs : mine == added.last ? added.last_pairs : n_pairs;
      uint32_t* counter = arrivals + entry * (n / kChunk) + block;
      is_last = atomicAdd(counter, count) + count == (kDown ? 2u : 4u) * n_pairs;
      if (is_last) *counter = 0;  // nobody else comes
    }
    unsigned last_ones = __ballot_sync(0xFFFFFFFFu, is_last);
    if (last_ones != 0) __threadfence();
#pragma unroll 1
    for (; last_ones != 0; last_ones &= last_ones - 1) {
      const int from = __ffs(last_ones) - 1;
      const int who = __shfl_sync(0xFFFFFFFFu, entry, from), where = __shfl_sync(0xFFFFFFFFu, block, from);
      if constexpr (kDown) {
        finish_slots(a, who, where, quota, lane);
      } else {
        finish_hidden(a, who, where, quota, lane);
      }
    }
  }
}

}  // namespace

ExpertsArguments experts_arguments(const ExpertTable& table, const ExpertsParams& p, const ExpertsScratch& s) {
  ExpertsArguments a = {};
  a.experts = table.experts.data();
  a.plan = static_cast<ExpertsPlan*>(s.plan.data());
  a.beginnings = reinterpret_cast<Beginning*>(s.beginnings.data());
  a.x = p.x;
  a.ids = p.ids;
  a.weights = p.weights;
  a.y = p.y;
  a.model_digits = s.model_digits.data();
  a.model_scales = s.model_scales.data();
  a.ff_digits = s.ff_digits.data();
  a.ff_scales = s.ff_scales.data();
  a.up_parts = s.up_parts.data();
  a.down_parts = s.down_parts.data();
  a.slot_outputs = s.slot_outputs.data();
  a.up_arrivals = s.arrivals.data();
  a.down_arrivals = a.up_arrivals + kMaxSlots * table.d_ff / kChunk;
  a.token_arrivals = a.down_arrivals + kMaxSlots * table.d_model / kChunk;
  a.d_model = static_cast<int>(table.d_model);
  a.d_ff = static_cast<int>(table.d_ff);
  a.n_slots = static_cast<int>(p.n_tokens * p.n_active);
  a.n_active = static_cast<int>(p.n_active);
  a.limit = p.limit;
  a.n_warps = s.n_blocks * kWarps;
  return a;
}

Status check_experts(const ExpertTable& table, const ExpertsParams& p, const ExpertsScratch& s) {
  if (p.n_tokens < 1 || p.n_active < 1 || p.n_tokens * p.n_active > kMaxSlots) {
    return invalid_argument("experts: " + std::to_string(p.n_tokens) + " tokens with " + std::to_string(p.n_active) +
                            " experts each; at least 1 and together at most " + std::to_string(kMaxSlots) + " slots, split the batch");
  }
  if (table.d_model != s.d_model || table.d_ff != s.d_ff) {
    return invalid_argument("experts: scratch was made for d_model " + std::to_string(s.d_model) + " and d_ff " + std::to_string(s.d_ff) +
                            ", the table has " + std::to_string(table.d_model) + " and " + std::to_string(table.d_ff));
  }
  return ok_status();
}

Result<ExpertTable> ExpertTable::create(device::Stream& stream, std::span<const ExpertMatrices> experts) {
  if (experts.empty()) return invalid_argument("experts: the table is empty");
  ExpertTable t;
  t.n_experts = static_cast<int>(experts.size());
  t.d_model = experts[0].gate.k;
  t.d_ff = experts[0].gate.n;
  constexpr int64_t kMaxExact = 16384;
  if (t.d_model > kMaxExact || t.d_ff > kMaxExact) {
    return unimplemented("experts: [" + std::to_string(t.d_model) + ", " + std::to_string(t.d_ff) + "] is larger than " +
                         std::to_string(kMaxExact) + ", beyond which 32-bit sums are not exact");
  }
  for (size_t e = 0; e < experts.size(); ++e) {
    const DeviceMatrix* const all[3] = {&experts[e].gate, &experts[e].up, &experts[e].down};
    for (int i = 0; i < 3; ++i) {
      const int64_t k = i == 2 ? t.d_ff : t.d_model, n = i == 2 ? t.d_model : t.d_ff;
      const std::string name = "expert " + std::to_string(e) + " projection " + std::to_string(i) + " (gate, up, down)";
      if (all[i]->k != k || all[i]->n != n) {
        return invalid_argument(name + ": expected [" + std::to_string(k) + ", " + std::to_string(n) + "], found [" +
                                std::to_string(all[i]->k) + ", " + std::to_string(all[i]->n) + "]");
      }
      if (all[i]->codebook != Codebook::kMul1) return unimplemented(name + ": only mul1 experts run on the GPU");
    }
  }
  ASSIGN_OR_RETURN(t.experts, device::DeviceArray<ExpertMatrices>::upload(stream, experts, "expert table"));
  return Result<ExpertTable>(std::move(t));
}

Result<ExpertsScratch> ExpertsScratch::create(device::Stream& stream, int64_t d_model, int64_t d_ff) {
  const int device = stream.device();
  ASSIGN_OR_RETURN(const device::DeviceInfo info, device::find_device(device));
  ExpertsScratch s;
  s.d_model = d_model;
  s.d_ff = d_ff;
  s.n_blocks = kBlocksPerSm * info.n_multiprocessors;
  s.has_dependent_launch = info.major >= 9;
  const size_t slots = kMaxSlots, warps = static_cast<size_t>(s.n_blocks) * kWarps;
  const size_t model_blocks = static_cast<size_t>(d_model / kChunk), ff_blocks = static_cast<size_t>(d_ff / kChunk);
  // A part's number is warp + column group: no two (warp, group) that meet share one.
  const size_t up_parts = warps + 2 * slots * 2 * ff_blocks, down_parts = warps + slots * 2 * model_blocks;
  ASSIGN_OR_RETURN(s.plan, device::DeviceBuffer::allocate(device, sizeof(ExpertsPlan), "experts plan"));
  ASSIGN_OR_RETURN(s.beginnings, device::DeviceArray<int64_t>::allocate(device, 2 * warps, "experts plan"));
  ASSIGN_OR_RETURN(s.model_digits, device::DeviceArray<uint8_t>::allocate(device, slots * 2 * model_blocks * kChunkBytes, "experts input"));
  ASSIGN_OR_RETURN(s.model_scales, device::DeviceArray<RowScale>::allocate(device, slots * 2, "experts input scales"));
  ASSIGN_OR_RETURN(s.ff_digits, device::DeviceArray<uint8_t>::allocate(device, slots * ff_blocks * kChunkBytes, "experts hidden"));
  ASSIGN_OR_RETURN(s.ff_scales, device::DeviceArray<FfScale>::allocate(device, slots * ff_blocks, "experts hidden scales"));
  ASSIGN_OR_RETURN(s.up_parts, device::DeviceArray<DigitSums>::allocate(device, up_parts * kSetRows * kGroupColumns, "gate and up sums"));
  ASSIGN_OR_RETURN(s.down_parts, device::DeviceArray<int64_t>::allocate(device, down_parts * kSetRows * kGroupColumns, "down sums"));
  ASSIGN_OR_RETURN(s.slot_outputs, device::DeviceArray<float>::allocate(device, slots * static_cast<size_t>(d_model), "experts outputs"));
  ASSIGN_OR_RETURN(s.arrivals, device::DeviceArray<uint32_t>::allocate(device, slots * (ff_blocks + 2 * model_blocks), "experts arrivals"));
  RETURN_IF_ERROR(stream.fill_bytes(s.arrivals.data(), 0, s.arrivals.size() * sizeof(uint32_t)));
  return Result<ExpertsScratch>(std::move(s));
}

Status run_experts(device::Stream& stream, const ExpertTable& table, const ExpertsParams& p, ExpertsScratch& scratch) {
  RETURN_IF_ERROR(check_experts(table, p, scratch));
  const ExpertsArguments a = experts_arguments(table, p, scratch);
  RETURN_IF_ERROR(rotate_tokens(stream, a));
  constexpr int kShared = kWarps * kRingBytes;
  ESPALIER_CUDA_TRY("experts", cudaFuncSetAttribute(experts_kernel<false>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  ESPALIER_CUDA_TRY("experts", cudaFuncSetAttribute(experts_kernel<true>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  cudaLaunchAttribute dependent = {};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(scratch.n_blocks));
  config.blockDim = dim3(32 * kWarps);
  config.dynamicSmemBytes = kShared;
  config.stream = stream.handle();
  config.attrs = &dependent;
  config.numAttrs = scratch.has_dependent_launch ? 1 : 0;
  cudaLaunchKernelEx(&config, experts_kernel<false>, a);
  RETURN_IF_ERROR(stream.launched("experts_kernel<gate, up>"));
  cudaLaunchKernelEx(&config, experts_kernel<true>, a);
  return stream.launched("experts_kernel<down>");
}

}  // namespace espalier::codec::cuda
