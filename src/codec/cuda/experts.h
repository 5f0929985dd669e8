// The routed experts of a layer for a few tokens on a GPU: gate and up, clamped SwiGLU, down, weighted sum, in three launches
// (and one small one that turns the routing into a plan). mul1 matrices; every expert and projection may have a width of its own.
//
// Weights are read once per four rows of an expert. Work is cut into equal stretches of packed memory without regard to experts; sums
// across the cuts are exact integers, so a token's bits depend on nothing but its own input and routing: not on the other tokens,
// their number, or the device. The last arriver at a block of columns finishes it in a fixed order; values are never added atomically.
// Relative output error about 4e-4.
// Source: docs/decisions/cuda-exl3-kernels.md; model/moe.h is the same on the CPU.
#pragma once

#include <cstdint>
#include <span>

#include "base/status.h"
#include "codec/cuda/matrix.h"
#include "device/buffer.h"
#include "device/stream.h"

namespace espalier::codec::cuda {

inline constexpr int kMaxSlots = 64;  // tokens x active experts of one call

// One expert: gate and up [d_model, d_ff], down [d_ff, d_model].
struct ExpertMatrices {
  DeviceMatrix gate, up, down;
};

// The experts of a layer in device memory; the matrices' memory belongs to someone else and must outlive it.
class ExpertTable {
 public:
  // Errors: invalid_argument naming the expert and projection for a shape that differs, unimplemented for another codebook than mul1
  // or d_model, d_ff beyond 16384 (exact 32-bit sums).
  static Result<ExpertTable> create(device::Stream& stream, std::span<const ExpertMatrices> experts);

  int64_t d_model = 0, d_ff = 0;
  int n_experts = 0;
  uint32_t widths = 0;  // bit k2: some matrix has that width
  device::DeviceArray<ExpertMatrices> experts;  // [n_experts]
};

struct ExpertsParams {
  const float* x = nullptr;         // [n_tokens, d_model]:f32
  const int32_t* ids = nullptr;     // [n_tokens, n_active], each below n_experts, different within a token
  const float* weights = nullptr;   // [n_tokens, n_active]
  float* y = nullptr;               // [n_tokens, d_model]:f32, overwritten; sum over the token's experts in the order of ids
  int64_t n_tokens = 0;             // n_tokens * n_active <= kMaxSlots
  int64_t n_active = 0;
  float limit = 0;                  // ops/swiglu.h
};

// One scale for a whole row: then sums over any stretch of k are exact integers.
struct RowScale {
  float scale;      // of main; residual units are 254 times smaller
  int digits_sum;   // 254 * sum of mains + sum of residuals
};
// One scale, a power of two, per 128 hidden values: the blocks of a row are finished apart.
struct FfScale {
  int exponent;
  int digits_sum;
};
struct DigitSums {
  int main, residual;
};

// Device memory for the calls of one stream, in order. Counters in it are zero between calls.
class ExpertsScratch {
 public:
  static Result<ExpertsScratch> create(device::Stream& stream, int64_t d_model, int64_t d_ff);

  int64_t d_model = 0, d_ff = 0;
  int n_blocks = 0;                            // of the two large launches: as many as are resident at once
  bool has_dependent_launch = false;
  device::DeviceBuffer plan;                   // ExpertsPlan in experts_plan.cuh
  device::DeviceBuffer starts;                 // [gate and up | down, warps]
  device::DeviceArray<uint8_t> model_digits;   // [slots, gate|up, d_model/128, 256]
  device::DeviceArray<RowScale> model_scales;  // [slots, gate|up]
  device::DeviceArray<uint8_t> ff_digits;      // [slots, d_ff/128, 256]
  device::DeviceArray<FfScale> ff_scales;      // [slots, d_ff/128]
  device::DeviceArray<DigitSums> up_parts;     // [parts, 4, 64]
  device::DeviceArray<int64_t> down_parts;     // [parts, 4, 64]
  device::DeviceArray<float> slot_outputs;     // [slots, d_model]
  device::DeviceArray<uint32_t> arrivals;      // [slots, d_ff/128], [slots, d_model/128] and [tokens, d_model/128]
};

// Queues the plan: from ids to the list of distinct experts with up to four rows each. To be called before run_experts with the same
// params; separate because a router may do it earlier.
Status plan_experts(device::Stream& stream, const ExpertTable& table, const ExpertsParams& p, ExpertsScratch& scratch);
// Queues the three launches. All pointers are device memory, 16-byte aligned.
// Errors: invalid_argument for sizes that do not fit table or scratch.
Status run_experts(device::Stream& stream, const ExpertTable& table, const ExpertsParams& p, ExpertsScratch& scratch);

}  // namespace espalier::codec::cuda
