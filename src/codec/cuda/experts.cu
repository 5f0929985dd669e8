#include "codec/cuda/experts.h"

#include <type_traits>

#include "codec/cuda/experts_finish.cuh"
#include "codec/cuda/experts_plan.cuh"
#include "codec/cuda/experts_stream.cuh"
#include "device/cuda_status.cuh"
#include "device/device.h"

namespace espalier::codec::cuda {
namespace {

constexpr int kWarps = 8;  // of a block
constexpr int kBlocksPerSm = 2;

// Gate and up, or down. A warp announces what it is going to add, streams its part of the line, and finishes those blocks of 128 columns
// of an entry to which it was the last to announce itself.
template <bool kDown, Widths kWidths>
__global__ __launch_bounds__(32 * kWarps, kBlocksPerSm) void experts_kernel(const __grid_constant__ ExpertsArguments a) {
  __shared__ uint32_t announcements[32 * kWarps];
  __shared__ Start starts[kWarps];  // kept out of registers, which are for the stream
  const int lane = threadIdx.x % 32, warp = blockIdx.x * kWarps + threadIdx.x / 32;
  Start& start = starts[threadIdx.x / 32];
  if (lane < static_cast<int>(sizeof(Start) / 16)) {
    const uint4* from = reinterpret_cast<const uint4*>(a.starts + (kDown ? a.n_warps + warp : warp));
    reinterpret_cast<uint4*>(&start)[lane] = __ldg(from + lane);
  }
  let_next_kernel_start();
  __syncwarp();
  if (start.job < 0) return wait_for_previous_kernel();  // every warp waits, so that the next kernel finds this one and its predecessor done

  {
    const int k = kDown ? a.d_ff : a.d_model, n_groups = (kDown ? a.d_model : a.d_ff) / kGroupColumns;
    Stretch s;
    s.n_pairs = k / kPairRows;
    s.blocks = start.blocks;
    s.begin = start.begin;
    s.end = start.end;
    s.n_rows = start.n_rows;
    s.announced = &start;
    int slot = start.slots[lane / 8], scales_slot = start.slots[lane % kSetRows], k2 = start.k2;
#pragma unroll 1
    for (int j = start.job;;) {
      const int64_t row = kDown ? slot : 2 * slot + j % 2;
      s.digits = (kDown ? a.ff_digits : a.model_digits) + row * (k / kChunk) * kChunkBytes + lane / 4 % 2 * 32 + lane % 4 * 8;
      s.scales = a.ff_scales + int64_t{scales_slot} * (k / kChunk);
      s.part = warp + j * n_groups;
      stream_any_width<kDown, kWidths>(a, s, k2, announcements);
      if (++j > start.last / n_groups) break;
      const Job& job = kDown ? a.plan->down.jobs[j] : a.plan->up.jobs[j];
      s.blocks = job.blocks;
      s.begin = 0;
      s.end = j == start.last / n_groups ? (start.last - j * n_groups) * s.n_pairs + start.last_pairs : s.n_pairs * n_groups;
      s.n_rows = job.n_rows;
      s.announced = nullptr;
      slot = job.slots[lane / 8], scales_slot = job.slots[lane % kSetRows], k2 = job.k2;
    }
  }

  // All parts are on their way. Between announcing a token's outputs and storing them there is no wait for a token.
  const int quota = kDown ? a.plan->down.quota : a.plan->up.quota;
  const int n_groups = (kDown ? a.d_model : a.d_ff) / kGroupColumns, n_pairs = (kDown ? a.d_ff : a.d_model) / kPairRows;
  for (int g = start.first; g <= start.last; g += 32) {
    const uint32_t announced = g == start.first ? announcements[threadIdx.x] : announce<kDown>(a, start, g, lane);
    const int mine = g + lane, job = mine / n_groups;
    const int entry = kDown ? job : job / 2, block = (mine - job * n_groups) / 2;
    const bool is_last = mine <= start.last && announced == (kDown ? 2u : 4u) * n_pairs;
    const unsigned duties = __ballot_sync(0xFFFFFFFFu, is_last);
    unsigned tokens = 0;
    if (is_last) {  // nobody else comes
      *(kDown ? a.down_arrivals + entry * (a.d_model / kChunk) + block : a.up_arrivals + entry * (a.d_ff / kChunk) + block) = 0;
    }
#pragma unroll 1
    for (unsigned left = duties; left != 0; left &= left - 1) {
      const int from = __ffs(left) - 1;
      const int who = __shfl_sync(0xFFFFFFFFu, entry, from), where = __shfl_sync(0xFFFFFFFFu, block, from);
      if constexpr (kDown) {
        const unsigned last_tokens = finish_slots(a, who, where, quota, lane);
        if (lane == from) tokens = last_tokens;
      } else {
        finish_hidden(a, who, where, quota, lane);
      }
    }
    if constexpr (kDown) {
#pragma unroll 1
      for (unsigned left = __ballot_sync(0xFFFFFFFFu, tokens != 0); left != 0; left &= left - 1) {
        const int from = __ffs(left) - 1;
        const int who = __shfl_sync(0xFFFFFFFFu, entry, from), where = __shfl_sync(0xFFFFFFFFu, block, from);
#pragma unroll 1
        for (unsigned rows = __shfl_sync(0xFFFFFFFFu, tokens, from); rows != 0; rows &= rows - 1) {
          finish_token(a, a.plan->entries[who].slots[__ffs(rows) - 1] / a.n_active, where, lane);
        }
      }
    }
  }
}

}  // namespace

ExpertsArguments experts_arguments(const ExpertTable& table, const ExpertsParams& p, const ExpertsScratch& s) {
  ExpertsArguments a = {};
  a.experts = table.experts.data();
  a.plan = static_cast<ExpertsPlan*>(s.plan.data());
  a.starts = static_cast<Start*>(s.starts.data());
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
      t.widths |= 1u << all[i]->k2;
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
  ASSIGN_OR_RETURN(s.starts, device::DeviceBuffer::allocate(device, 2 * warps * sizeof(Start), "experts plan"));
  ASSIGN_OR_RETURN(s.model_digits, device::DeviceArray<uint8_t>::allocate(device, slots * 2 * model_blocks * kChunkBytes, "experts input"));
  ASSIGN_OR_RETURN(s.model_scales, device::DeviceArray<RowScale>::allocate(device, slots * 2, "experts input scales"));
  ASSIGN_OR_RETURN(s.ff_digits, device::DeviceArray<uint8_t>::allocate(device, slots * ff_blocks * kChunkBytes, "experts hidden"));
  ASSIGN_OR_RETURN(s.ff_scales, device::DeviceArray<FfScale>::allocate(device, slots * ff_blocks, "experts hidden scales"));
  ASSIGN_OR_RETURN(s.up_parts, device::DeviceArray<DigitSums>::allocate(device, up_parts * kSetRows * kGroupColumns, "gate and up sums"));
  ASSIGN_OR_RETURN(s.down_parts, device::DeviceArray<int64_t>::allocate(device, down_parts * kSetRows * kGroupColumns, "down sums"));
  ASSIGN_OR_RETURN(s.slot_outputs, device::DeviceArray<float>::allocate(device, slots * static_cast<size_t>(d_model), "experts outputs"));
  ASSIGN_OR_RETURN(s.arrivals, device::DeviceArray<uint32_t>::allocate(device, slots * (ff_blocks + 2 * model_blocks), "experts arrivals"));
  RETURN_IF_ERROR(stream.fill_bytes(s.arrivals.data(), 0, s.arrivals.size() * sizeof(uint32_t)));
  RETURN_IF_ERROR(stream.fill_bytes(s.up_parts.data(), kEmptyIntegerByte, s.up_parts.size() * sizeof(DigitSums)));
  RETURN_IF_ERROR(stream.fill_bytes(s.down_parts.data(), kEmptyIntegerByte, s.down_parts.size() * sizeof(int64_t)));
  RETURN_IF_ERROR(stream.fill_bytes(s.slot_outputs.data(), kEmptyFloatByte, s.slot_outputs.size() * sizeof(float)));
  return Result<ExpertsScratch>(std::move(s));
}

Status run_experts(device::Stream& stream, const ExpertTable& table, const ExpertsParams& p, ExpertsScratch& scratch) {
  RETURN_IF_ERROR(check_experts(table, p, scratch));
  const ExpertsArguments a = experts_arguments(table, p, scratch);
  RETURN_IF_ERROR(rotate_tokens(stream, a, scratch.has_dependent_launch));
  cudaLaunchAttribute dependent = {};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(scratch.n_blocks));
  config.blockDim = dim3(32 * kWarps);
  config.stream = stream.handle();
  config.attrs = &dependent;
  config.numAttrs = scratch.has_dependent_launch ? 1 : 0;
  // A kernel for one width has the registers and the instruction cache for itself.
  const auto launch = [&](auto widths) -> Status {
    cudaLaunchKernelEx(&config, experts_kernel<false, decltype(widths)::value>, a);
    RETURN_IF_ERROR(stream.launched("experts_kernel<gate, up>"));
    cudaLaunchKernelEx(&config, experts_kernel<true, decltype(widths)::value>, a);
    return stream.launched("experts_kernel<down>");
  };
  const auto is_within = [&](Widths widths) { return (table.widths & ~widths) == 0; };
  if (is_within(1u << 4)) return launch(std::integral_constant<Widths, 1u << 4>());
  if (is_within(1u << 6)) return launch(std::integral_constant<Widths, 1u << 6>());
  if (is_within(1u << 8)) return launch(std::integral_constant<Widths, 1u << 8>());
  if (is_within(kCommonWidths)) return launch(std::integral_constant<Widths, kCommonWidths>());
  return launch(std::integral_constant<Widths, kAllWidths>());
}

}  // namespace espalier::codec::cuda

