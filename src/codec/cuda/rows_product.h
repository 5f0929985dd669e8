// y = x W on a GPU for any number of rows and any stored form of W: FP8, MXFP4, BF16, F16, F32 and EXL3 of every width and codebook; for
// one matrix, and for a list of experts of which every row uses a few.
//
// Bits: those of the CPU (ops/matmul.h, codec/matmul.h). Every output is one chain of fused multiply-adds over ascending k from zero,
// EXL3 in the rotated basis between the two rotations, so a row's result does not depend on the other rows, their number, or how rows
// are grouped. Weights are decoded tile by tile into shared memory, once per 4 or 16 rows.
// Source: docs/formats/exl3.md, "Forward order"; model.md 2.2, section 6.
#pragma once

#include <cstdint>
#include <span>

#include "base/status.h"
#include "codec/cuda/matrix.h"
#include "device/buffer.h"
#include "device/stream.h"
#include "ops/cuda/native_weight.h"

namespace espalier::codec::cuda {

// A matrix of any form that someone else owns; cheap to copy, usable in kernels.
struct DeviceWeight {
  bool is_exl3 = false;
  ops::cuda::NativeWeight native;  // when not is_exl3
  DeviceMatrix exl3;               // when is_exl3
  int64_t in = 0;
  int64_t out = 0;
};

DeviceWeight weight_of(const DeviceMatrix& matrix);
DeviceWeight weight_of(const ops::cuda::NativeWeight& native);

struct RowsProductParams {
  DeviceWeight weight;
  const float* x = nullptr;  // [n_rows, in], row stride x_stride
  int64_t x_stride = 0;
  float* y = nullptr;        // [n_rows, out], row stride y_stride; must not alias x
  int64_t y_stride = 0;
  int64_t n_rows = 0;
  float* rotated = nullptr;  // scratch [n_rows, in]; used for EXL3 only
};
// Queues one launch, for EXL3 three. Errors: invalid_argument for more rows than a launch holds.
Status multiply_rows(device::Stream& stream, const RowsProductParams& p);

// Which slots (row, place among its active experts) use which expert, as pieces of up to kPieceRows slots of one expert.
inline constexpr int kPieceRows = 16;
struct ExpertPiece {
  int32_t expert;
  int32_t first;  // in ExpertPlan::order
  int32_t n;
};
struct ExpertPlan {
  int64_t max_slots = 0;
  int64_t n_experts = 0;
  device::DeviceArray<int32_t> order;        // [max_slots] slots by expert, then by slot
  device::DeviceArray<ExpertPiece> pieces;   // [max_slots]
  device::DeviceArray<int32_t> n_pieces;     // [1]

  static Result<ExpertPlan> create(device::Stream& stream, int64_t max_slots, int64_t n_experts);
};
// Queues the plan for ids [n_slots] (device memory), each in [0, n_experts).
// Errors: invalid_argument for more slots than the plan holds.
Status plan_expert_rows(device::Stream& stream, const int32_t* ids, int64_t n_slots, ExpertPlan& plan);

struct ExpertsProductParams {
  const DeviceWeight* weights = nullptr;  // device memory, [n_experts]; all [in, out], forms may differ
  const int32_t* ids = nullptr;           // [n_slots], as given to plan_expert_rows
  const ExpertPlan* plan = nullptr;
  const float* x = nullptr;               // [n_slots / slots_per_row, in]: slot s uses row s / slots_per_row
  int64_t slots_per_row = 1;
  float* y = nullptr;                     // [n_slots, out]
  float* rotated = nullptr;               // scratch [n_slots, in]
  int64_t n_slots = 0;
  int64_t max_per_expert = 0;             // no expert has more slots: the rows of the call, when a row uses an expert at most once
  int64_t in = 0;
  int64_t out = 0;
};
Status multiply_expert_rows(device::Stream& stream, const ExpertsProductParams& p);

}  // namespace espalier::codec::cuda
