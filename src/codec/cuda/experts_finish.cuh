// What the last arriver does with 128 finished columns: sums the parts, which is exact in any order, leaves the integers, rotates,
// and goes on to the next phase. One warp; lane l has columns 4l .. 4l+3.
#pragma once

#include "codec/cuda/experts_plan.cuh"
#include "codec/cuda/experts_stream.cuh"

namespace espalier::codec::cuda {

// Value of an exact sum of (254 main + residual) * byte sums, before the row's scale.
__device__ __forceinline__ float affine(int64_t sum, int64_t digits_sum) {
  const int64_t centred = sum - kWholeOffset * digits_sum;
  return (static_cast<float>(centred) - kRestOffset * static_cast<float>(digits_sum)) * (kSlope / kResidualUnits);
}

__device__ __forceinline__ float silu(float v) { return v / (1.0f + expf(-v)); }

// 128 hidden values of every row of an entry: gate and up, activation, rotation for down, digits.
__device__ __forceinline__ void finish_hidden(const ExpertsArguments& a, int entry_index, int block, int quota, int lane) {
  const Entry entry = a.plan->entries[entry_index];
  const int n_pairs = a.d_model / kPairRows, n_groups = a.d_ff / kGroupColumns, n_blocks = a.d_ff / kChunk;
  const int group = 2 * block + lane / 16, column = 4 * (lane % 16);
  const float4 svh_gate = load_scales(entry.gate_svh + block * kChunk, lane), svh_up = load_scales(entry.up_svh + block * kChunk, lane);
  const float4 suh_down = load_scales(entry.down_suh + block * kChunk, lane);
  int n_parts[2];
  const DigitSums* parts[2];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const Arrivals who = arrivals_of(a.plan->up.jobs[2 * entry_index + m], quota, group, n_pairs);
    n_parts[m] = who.last - who.first + 1;
    parts[m] = a.up_parts + int64_t{who.first + (2 * entry_index + m) * n_groups + group} * kSetRows * kGroupColumns + column;
  }
  const int most = __reduce_max_sync(0xFFFFFFFFu, max(n_parts[0], n_parts[1]));
  for (int row = 0; row < entry.n_rows; ++row) {
    const int slot = entry.slots[row];
    const int4 scales = __ldcg(reinterpret_cast<const int4*>(a.model_scales + 2 * slot));  // gate's scale, sum, up's scale, sum
    int mains[2][4] = {}, residuals[2][4] = {};
    for (int j0 = 0; j0 < most; j0 += 4) {
      int4 low[4][2], high[4][2];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const int4* from = reinterpret_cast<const int4*>(parts[m] + int64_t{(j0 + j) * kSetRows + row} * kGroupColumns);
          const bool there = j0 + j < n_parts[m];
          low[j][m] = there ? __ldcg(from) : int4{0, 0, 0, 0};
          high[j][m] = there ? __ldcg(from + 1) : int4{0, 0, 0, 0};
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          mains[m][0] += low[j][m].x, residuals[m][0] += low[j][m].y, mains[m][1] += low[j][m].z, residuals[m][1] += low[j][m].w;
          mains[m][2] += high[j][m].x, residuals[m][2] += high[j][m].y, mains[m][3] += high[j][m].z, residuals[m][3] += high[j][m].w;
        }
      }
    }
    float v[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const float scale = __int_as_float(m == 0 ? scales.x : scales.z);
      const int digits_sum = m == 0 ? scales.y : scales.w;
#pragma unroll
      for (int j = 0; j < 4; ++j) v[m][j] = affine(int64_t{kResidualUnits} * mains[m][j] + residuals[m][j], digits_sum) * scale;
      rotate_chunk(v[m], lane);
    }
    const float gate_scales[4] = {svh_gate.x, svh_gate.y, svh_gate.z, svh_gate.w}, up_scales[4] = {svh_up.x, svh_up.y, svh_up.z, svh_up.w};
    const float down_scales[4] = {suh_down.x, suh_down.y, suh_down.z, suh_down.w};
    float h[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // As ops/swiglu.h; comparisons that let NaN through.
      const float g = v[0][j] * gate_scales[j], u = v[1][j] * up_scales[j];
      const float gate = g > a.limit ? a.limit : g, up = u > a.limit ? a.limit : u < -a.limit ? -a.limit : u;
      h[j] = silu(gate) * up * down_scales[j];
    }
    rotate_chunk(h, lane);
    const float largest = chunk_max(h);
    // Smallest power of two that is at least largest / 127; the tiniest values count as 2^-100.
    const int bits = __float_as_int(largest);
    int exponent = max((bits >> 23) - 127 - 6 + ((bits & 0x7FFFFF) > 0x7E0000 ? 1 : 0), -100);
    const float per_unit = largest < INFINITY ? __int_as_float((127 - exponent) << 23) : 0.0f;
    if (!(largest < INFINITY)) exponent = kNotFinite;
    const Digits digits = digits_of(h, per_unit);
    const int64_t at = int64_t{slot} * n_blocks + block;
    store_digits(digits, lane, a.ff_digits + at * kChunkBytes);
    if (lane == 0) a.ff_scales[at] = {exponent, kResidualUnits * digits.sum_main + digits.sum_residual};
  }
}

// 128 outputs of a token: its experts' in order.
__device__ __forceinline__ void finish_token(const ExpertsArguments& a, int token, int block, int lane) {
  const float* from = a.slot_outputs + int64_t{token} * a.n_active * a.d_model + block * kChunk + 4 * lane;
  float4 y = {0, 0, 0, 0};
#pragma unroll 6
  for (int i = 0; i < a.n_active; ++i) {
    const float4 v = __ldcg(reinterpret_cast<const float4*>(from + int64_t{i} * a.d_model));
    y.x += v.x, y.y += v.y, y.z += v.z, y.w += v.w;
  }
  reinterpret_cast<float4*>(a.y + int64_t{token} * a.d_model + block * kChunk)[lane] = y;
}

// 128 weighted outputs of every row of an entry; then the tokens for which these were the last.
__device__ __forceinline__ void finish_slots(const ExpertsArguments& a, int entry_index, int block, int quota, int lane) {
  const Entry entry = a.plan->entries[entry_index];
  const int n_pairs = a.d_ff / kPairRows, n_groups = a.d_model / kGroupColumns, n_blocks = a.d_ff / kChunk;
  const int group = 2 * block + lane / 16, column = 4 * (lane % 16);
  const float4 svh = load_scales(entry.down_svh + block * kChunk, lane);
  const Arrivals who = arrivals_of(a.plan->down.jobs[entry_index], quota, group, n_pairs);
  const int n_parts = who.last - who.first + 1, most = __reduce_max_sync(0xFFFFFFFFu, n_parts);
  const int64_t* parts = a.down_parts + int64_t{who.first + entry_index * n_groups + group} * kSetRows * kGroupColumns + column;
  for (int row = 0; row < entry.n_rows; ++row) {
    const int slot = entry.slots[row];
    const float weight = __ldg(a.weights + slot);
    const FfScale* scales = a.ff_scales + int64_t{slot} * n_blocks;
    const int top = __reduce_max_sync(0xFFFFFFFFu, top_exponent(scales, n_blocks, lane, 32));
    int64_t digits_sum = 0;
    for (int c = lane; c < n_blocks; c += 32) {
      const int2 raw = __ldcg(reinterpret_cast<const int2*>(scales + c));
      digits_sum += int64_t{raw.y} * unit_of(raw.x, top);
    }
    int64_t sum[4] = {0, 0, 0, 0};
    for (int j0 = 0; j0 < most; j0 += 4) {
      longlong2 low[4], high[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const longlong2* from = reinterpret_cast<const longlong2*>(parts + int64_t{(j0 + j) * kSetRows + row} * kGroupColumns);
        const bool there = j0 + j < n_parts;
        low[j] = there ? __ldcg(from) : longlong2{0, 0};
        high[j] = there ? __ldcg(from + 1) : longlong2{0, 0};
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[0] += low[j].x, sum[1] += low[j].y, sum[2] += high[j].x, sum[3] += high[j].y;
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) digits_sum += __shfl_xor_sync(0xFFFFFFFFu, digits_sum, distance);
    const float scale = top == kNotFinite ? NAN : __int_as_float((top - kHeadroom + 127) << 23);
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = affine(sum[j], digits_sum) * scale;
    rotate_chunk(v, lane);
    const float4 out = {v[0] * svh.x * weight, v[1] * svh.y * weight, v[2] * svh.z * weight, v[3] * svh.w * weight};
    __stcg(reinterpret_cast<float4*>(a.slot_outputs + int64_t{slot} * a.d_model + block * kChunk) + lane, out);
  }
  __threadfence();
  __syncwarp();
  bool is_last = false;
  int token = 0;
  if (lane < entry.n_rows) {
    token = entry.slots[lane] / a.n_active;
    uint32_t* counter = a.token_arrivals + token * (a.d_model / kChunk) + block;
    is_last = atomicAdd(counter, 1u) + 1 == static_cast<uint32_t>(a.n_active);
    if (is_last) *counter = 0;  // nobody else comes
  }
  unsigned last_ones = __ballot_sync(0xFFFFFFFFu, is_last);
  if (last_ones != 0) __threadfence();
  for (; last_ones != 0; last_ones &= last_ones - 1) {
    finish_token(a, __shfl_sync(0xFFFFFFFFu, token, __ffs(last_ones) - 1), block, lane);
  }
}

}  // namespace espalier::codec::cuda
