// What the last arriver does with 128 finished columns: sums the parts, which is exact in any order, leaves the integers, rotates,
// and goes on to the next phase. One warp; lane l has columns 4l .. 4l+3.
#pragma once

#include "codec/cuda/experts_plan.cuh"
#include "codec/cuda/experts_stream.cuh"

namespace espalier::codec::cuda {

constexpr int kPartsAtOnce = 3;

// Elements are stored whole, and no sum has the low word of an empty place (the digits' sums: experts_stream.cuh) or its high word.
__device__ __forceinline__ bool have_arrived(const ulonglong2& v) { return v.x != kEmptyInteger64 && v.y != kEmptyInteger64; }

// Value of an exact sum of (254 main + residual) * byte sums, before the row's scale.
__device__ __forceinline__ float affine(int64_t sum, int64_t digits_sum) {
  const int64_t centred = sum - kWholeOffset * digits_sum;
  return (static_cast<float>(centred) - kRestOffset * static_cast<float>(digits_sum)) * (kSlope / kResidualUnits);
}

__device__ __forceinline__ float silu(float v) { return v / (1.0f + expf(-v)); }

// 128 hidden values of every row of an entry: gate and up, activation, rotation for down, digits.
__device__ __forceinline__ void finish_hidden(const ExpertsArguments& a, int entry_index, int block, int quota, int lane) {
  const Entry& entry = a.plan->entries[entry_index];
  const int n_pairs = a.d_model / kPairRows, n_groups = a.d_ff / kGroupColumns, n_blocks = a.d_ff / kChunk;
  const int group = 2 * block + lane / 16, column = 4 * (lane % 16);
  const float4 svh_gate = load_scales(entry.gate_svh + block * kChunk, lane), svh_up = load_scales(entry.up_svh + block * kChunk, lane);
  const float4 suh_down = load_scales(entry.down_suh + block * kChunk, lane);
  int n_parts[2];
  DigitSums* parts[2];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const Arrivals who = arrivals_of(a.plan->up.jobs[2 * entry_index + m], quota, group, n_pairs);
    n_parts[m] = who.last - who.first + 1;
    parts[m] = a.up_parts + int64_t{who.first + (2 * entry_index + m) * n_groups + group} * kSetRows * kGroupColumns + column;
  }
  const int most = __reduce_max_sync(0xFFFFFFFFu, max(n_parts[0], n_parts[1]));
#pragma unroll 1
  for (int row = 0; row < entry.n_rows; ++row) {
    const int slot = entry.slots[row];
    const int4 scales = __ldcg(reinterpret_cast<const int4*>(a.model_scales + 2 * slot));  // gate's scale, sum, up's scale, sum
    int mains[2][4] = {}, residuals[2][4] = {};
#pragma unroll 1
    for (int j0 = 0; j0 < most; j0 += kPartsAtOnce) {
      ulonglong2 got[kPartsAtOnce][2][2];
      bool all_there;
      do {
        all_there = true;
#pragma unroll
        for (int j = 0; j < kPartsAtOnce; ++j) {
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            const DigitSums* from = parts[m] + int64_t{(j0 + j) * kSetRows + row} * kGroupColumns;
            const bool there = j0 + j < n_parts[m];
            got[j][m][0] = there ? load_relaxed_64(from) : ulonglong2{0, 0};
            got[j][m][1] = there ? load_relaxed_64(from + 2) : ulonglong2{0, 0};
          }
        }
#pragma unroll
        for (int j = 0; j < kPartsAtOnce; ++j) {
#pragma unroll
          for (int m = 0; m < 2; ++m) all_there = all_there && have_arrived(got[j][m][0]) && have_arrived(got[j][m][1]);
        }
      } while (!__all_sync(0xFFFFFFFFu, all_there));
#pragma unroll
      for (int j = 0; j < kPartsAtOnce; ++j) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const ulonglong2 v = got[j][m][half];
            mains[m][2 * half] += static_cast<int>(v.x), residuals[m][2 * half] += static_cast<int>(v.x >> 32);
            mains[m][2 * half + 1] += static_cast<int>(v.y), residuals[m][2 * half + 1] += static_cast<int>(v.y >> 32);
          }
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
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll 1
      for (int j = 0; j < n_parts[m]; ++j) {
        DigitSums* read = parts[m] + int64_t{j * kSetRows + row} * kGroupColumns;
        store_relaxed(read, filled(kEmptyInteger));
        store_relaxed(read + 2, filled(kEmptyInteger));
      }
    }
  }
}

// 128 outputs of a token: its experts' in order.
__device__ __forceinline__ void finish_token(const ExpertsArguments& a, int token, int block, int lane) {
  float* from = a.slot_outputs + int64_t{token} * a.n_active * a.d_model + block * kChunk + 4 * lane;
  float4 y = {0, 0, 0, 0};
  constexpr int kAtOnce = 8;
  for (int i0 = 0; i0 < a.n_active; i0 += kAtOnce) {
    uint4 v[kAtOnce];
    bool all_there;
    do {
      all_there = true;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) v[i] = i0 + i < a.n_active ? load_relaxed(from + int64_t{i0 + i} * a.d_model) : filled(0);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) all_there = all_there && has_none(v[i], kEmptyFloat);
    } while (!__all_sync(0xFFFFFFFFu, all_there));
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (i0 + i < a.n_active) {
        y.x += __uint_as_float(v[i].x), y.y += __uint_as_float(v[i].y), y.z += __uint_as_float(v[i].z), y.w += __uint_as_float(v[i].w);
      }
    }
  }
  reinterpret_cast<float4*>(a.y + int64_t{token} * a.d_model + block * kChunk)[lane] = y;
  for (int i = 0; i < a.n_active; ++i) store_relaxed(from + int64_t{i} * a.d_model, filled(kEmptyFloat));
}

// 128 weighted outputs of every row of an entry. Returns (bit r: row r) for which tokens these were announced last.
__device__ __forceinline__ unsigned finish_slots(const ExpertsArguments& a, int entry_index, int block, int quota, int lane) {
  const Entry& entry = a.plan->entries[entry_index];
  const int n_rows = entry.n_rows;
  const int n_pairs = a.d_ff / kPairRows, n_groups = a.d_model / kGroupColumns, n_blocks = a.d_ff / kChunk;
  const int group = 2 * block + lane / 16, column = 4 * (lane % 16);
  uint32_t* counter = nullptr;
  uint32_t arrived = 0;
  if (lane < n_rows) {
    counter = a.token_arrivals + entry.slots[lane] / a.n_active * (a.d_model / kChunk) + block;
    arrived = atomicAdd(counter, 1u) + 1;
  }
  const float4 svh = load_scales(entry.down_svh + block * kChunk, lane);
  const Arrivals who = arrivals_of(a.plan->down.jobs[entry_index], quota, group, n_pairs);
  const int n_parts = who.last - who.first + 1, most = __reduce_max_sync(0xFFFFFFFFu, n_parts);
  int64_t* parts = a.down_parts + int64_t{who.first + entry_index * n_groups + group} * kSetRows * kGroupColumns + column;
#pragma unroll 1
  for (int row = 0; row < n_rows; ++row) {
    const int slot = entry.slots[row];
    const float weight = __ldg(a.weights + slot);
    constexpr int kMaxScales = 4;  // a lane's, at d_ff 16384
    int2 raw[kMaxScales];
#pragma unroll
    for (int i = 0; i < kMaxScales; ++i) {
      const int c = lane + 32 * i;
      raw[i] = c < n_blocks ? __ldcg(reinterpret_cast<const int2*>(a.ff_scales + int64_t{slot} * n_blocks + c)) : int2{-1000, 0};
    }
    int64_t sum[4] = {0, 0, 0, 0};
    constexpr int kAtOnce = 6;
    for (int j0 = 0; j0 < most; j0 += kAtOnce) {
      ulonglong2 low[kAtOnce], high[kAtOnce];
      bool all_there;
      do {
        all_there = true;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const int64_t* from = parts + int64_t{(j0 + j) * kSetRows + row} * kGroupColumns;
          const bool there = j0 + j < n_parts;
          low[j] = there ? load_relaxed_64(from) : ulonglong2{0, 0};
          high[j] = there ? load_relaxed_64(from + 2) : ulonglong2{0, 0};
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          all_there = all_there && have_arrived(low[j]) && have_arrived(high[j]);
        }
      } while (!__all_sync(0xFFFFFFFFu, all_there));
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        sum[0] += static_cast<int64_t>(low[j].x), sum[1] += static_cast<int64_t>(low[j].y);
        sum[2] += static_cast<int64_t>(high[j].x), sum[3] += static_cast<int64_t>(high[j].y);
      }
    }
    int top = -1000;
#pragma unroll
    for (int i = 0; i < kMaxScales; ++i) top = max(top, raw[i].x);
    top = __reduce_max_sync(0xFFFFFFFFu, top);
    int64_t digits_sum = 0;
#pragma unroll
    for (int i = 0; i < kMaxScales; ++i) digits_sum += int64_t{raw[i].y} * unit_of(raw[i].x, top);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) digits_sum += __shfl_xor_sync(0xFFFFFFFFu, digits_sum, distance);
    const float scale = top == kNotFinite ? NAN : __int_as_float((top - kHeadroom + 127) << 23);
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = affine(sum[j], digits_sum) * scale;
    rotate_chunk(v, lane);
    const uint4 out = {__float_as_uint(v[0] * svh.x * weight), __float_as_uint(v[1] * svh.y * weight), __float_as_uint(v[2] * svh.z * weight),
                       __float_as_uint(v[3] * svh.w * weight)};
    store_relaxed(a.slot_outputs + int64_t{slot} * a.d_model + block * kChunk + 4 * lane, out);
#pragma unroll 1
    for (int j = 0; j < n_parts; ++j) {
      int64_t* read = parts + int64_t{j * kSetRows + row} * kGroupColumns;
      store_relaxed(read, filled(kEmptyInteger));
      store_relaxed(read + 2, filled(kEmptyInteger));
    }
  }
  const bool is_last = lane < n_rows && arrived == static_cast<uint32_t>(a.n_active);
  if (is_last) *counter = 0;  // nobody else comes
  return __ballot_sync(0xFFFFFFFFu, is_last);
}

}  // namespace espalier::codec::cuda
