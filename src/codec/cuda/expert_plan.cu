// The plan of codec/cuda/rows_product.h: slots by expert.
#include "codec/cuda/rows_product.h"

namespace espalier::codec::cuda {
namespace {

constexpr int kPlanThreads = 1024;

// One block. A thread per expert counts its slots; after a running sum every thread writes its own slots and pieces, in ascending order.
__global__ __launch_bounds__(kPlanThreads) void plan_expert_rows_kernel(const int32_t* ids, int32_t n_slots, int32_t n_experts, int32_t* order,
                                                                        ExpertPiece* pieces, int32_t* n_pieces) {
  extern __shared__ int32_t counts[];  // [n_experts] counts, then first slots; [n_experts] first pieces
  int32_t* first_piece = counts + n_experts;
  for (int32_t e = static_cast<int32_t>(threadIdx.x); e < n_experts; e += kPlanThreads) {
    int32_t n = 0;
    for (int32_t s = 0; s < n_slots; ++s) n += ids[s] == e ? 1 : 0;
    counts[e] = n;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int32_t slots = 0, n = 0;
    for (int32_t e = 0; e < n_experts; ++e) {
      const int32_t count = counts[e];
      counts[e] = slots;
      first_piece[e] = n;
      slots += count;
      n += (count + kPieceRows - 1) / kPieceRows;
    }
    *n_pieces = n;
  }
  __syncthreads();
  for (int32_t e = static_cast<int32_t>(threadIdx.x); e < n_experts; e += kPlanThreads) {
    const int32_t first = counts[e];
    int32_t n = 0;
    for (int32_t s = 0; s < n_slots; ++s) {
      if (ids[s] == e) order[first + n++] = s;
    }
    for (int32_t begin = 0; begin < n; begin += kPieceRows) {
      pieces[first_piece[e] + begin / kPieceRows] = {e, first + begin, n - begin < kPieceRows ? n - begin : kPieceRows};
    }
  }
}

}  // namespace

Result<ExpertPlan> ExpertPlan::create(device::Stream& stream, int64_t max_slots, int64_t n_experts) {
  if (n_experts < 1 || n_experts > 4096 || max_slots < 1 || max_slots > 65535) {
    return invalid_argument("expert plan: expected 1 to 4096 experts and 1 to 65535 rows times active experts, found " +
                            std::to_string(n_experts) + " and " + std::to_string(max_slots));
  }
  ExpertPlan plan;
  plan.max_slots = max_slots;
  plan.n_experts = n_experts;
  ASSIGN_OR_RETURN(plan.order, device::DeviceArray<int32_t>::allocate(stream.device(), static_cast<size_t>(max_slots), "expert plan"));
  ASSIGN_OR_RETURN(plan.pieces, device::DeviceArray<ExpertPiece>::allocate(stream.device(), static_cast<size_t>(max_slots), "expert plan"));
  ASSIGN_OR_RETURN(plan.n_pieces, device::DeviceArray<int32_t>::allocate(stream.device(), 1, "expert plan"));
  return Result<ExpertPlan>(std::move(plan));
}

Status plan_expert_rows(device::Stream& stream, const int32_t* ids, int64_t n_slots, ExpertPlan& plan) {
  if (n_slots > plan.max_slots) {
    return invalid_argument("expert plan: expected at most " + std::to_string(plan.max_slots) + " slots, found " + std::to_string(n_slots));
  }
  plan_expert_rows_kernel<<<1, kPlanThreads, static_cast<size_t>(2 * plan.n_experts) * sizeof(int32_t), stream.handle()>>>(
      ids, static_cast<int32_t>(n_slots), static_cast<int32_t>(plan.n_experts), plan.order.data(), plan.pieces.data(), plan.n_pieces.data());
  return stream.launched("plan_expert_rows_kernel");
}

}  // namespace espalier::codec::cuda
