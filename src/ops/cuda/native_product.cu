#include "ops/cuda/native_product.h"

#include "ops/cuda/lanes.cuh"
#include "ops/cuda/native_tile.cuh"

namespace espalier::ops::cuda {
namespace {

constexpr int kWarps = 8;        // of a block
constexpr int kLaneInputs = 8;   // of a step of a lane
constexpr int kStep = 32 * kLaneInputs;
constexpr int64_t kWantedWarps = 2112;  // 16 on each of 132 multiprocessors

// Slices of k for one output; they are warps of one block.
int slices_for(int64_t in, int64_t out) {
  int slices = 1;
  while (slices < kWarps && out * slices < kWantedWarps && in >= 2 * slices * kStep) slices *= 2;
  return slices;
}

template <NativeForm form>
__device__ __forceinline__ void load_eight(const NativeWeight& w, int64_t o, int64_t i, float (&v)[kLaneInputs]) {
  const int64_t at = o * w.in + i;
  if constexpr (form == NativeForm::kF32) {
    const float4 a = __ldg(reinterpret_cast<const float4*>(w.weight + 4 * at)), b = __ldg(reinterpret_cast<const float4*>(w.weight + 4 * at) + 1);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  } else if constexpr (form == NativeForm::kBf16 || form == NativeForm::kF16) {
    const uint4 a = __ldg(reinterpret_cast<const uint4*>(w.weight + 2 * at));
    const uint32_t words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (form == NativeForm::kBf16) {
        v[2 * j] = __uint_as_float(words[j] << 16), v[2 * j + 1] = __uint_as_float(words[j] & 0xFFFF0000u);
      } else {
        v[2 * j] = __half2float(__ushort_as_half(static_cast<uint16_t>(words[j])));
        v[2 * j + 1] = __half2float(__ushort_as_half(static_cast<uint16_t>(words[j] >> 16)));
      }
    }
  } else if constexpr (form == NativeForm::kFp8) {
    const float s = value_of_e8m0(__ldg(w.scale + (w.row_begin + o) / w.block_rows * w.scale_cols + i / w.block_cols));
    const uint2 a = __ldg(reinterpret_cast<const uint2*>(w.weight + at));
#pragma unroll
    for (int j = 0; j < kLaneInputs; ++j) v[j] = value_of_e4m3((j < 4 ? a.x : a.y) >> (8 * (j % 4)) & 255u) * s;
  } else {
    const float s = value_of_e8m0(__ldg(w.scale + o * w.scale_cols + i / 32));
    const uint32_t a = __ldg(reinterpret_cast<const uint32_t*>(w.weight + at / 2));
#pragma unroll
    for (int j = 0; j < kLaneInputs; ++j) v[j] = value_of_e2m1(a >> (4 * j) & 15u) * s;
  }
}

// A block of warps: kWarps / n_slices outputs of kRows rows.
template <NativeForm form, int kRows>
__global__ __launch_bounds__(32 * kWarps) void native_product_kernel(NativeProductParams p, int n_slices) {
  __shared__ float parts[kWarps][kRows];
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int slice = warp % n_slices, n_outputs = kWarps / n_slices;
  const int64_t o = int64_t{blockIdx.x} * n_outputs + warp / n_slices, first = int64_t{blockIdx.y} * kRows;
  const int n_rows = static_cast<int>(p.n_rows - first < kRows ? p.n_rows - first : kRows);
  float acc[kRows] = {};
  if (o < p.weight.out) {
    const float* x = p.x + first * p.x_stride;
#pragma unroll 2
    for (int64_t i = int64_t{slice} * kStep + lane * kLaneInputs; i < p.weight.in; i += int64_t{n_slices} * kStep) {
      float v[kLaneInputs];
      load_eight<form>(p.weight, o, i, v);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r < n_rows) {
          const float4 a = *reinterpret_cast<const float4*>(x + r * p.x_stride + i), b = *reinterpret_cast<const float4*>(x + r * p.x_stride + i + 4);
          const float in[kLaneInputs] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
          for (int j = 0; j < kLaneInputs; ++j) acc[r] = fmaf(in[j], v[j], acc[r]);
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float sum = warp_sum(acc[r]);
    if (lane == 0) parts[warp][r] = sum;
  }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) >= n_outputs * kRows) return;
  const int mine = static_cast<int>(threadIdx.x) / kRows, r = static_cast<int>(threadIdx.x) % kRows;
  const int64_t out = int64_t{blockIdx.x} * n_outputs + mine;
  if (out >= p.weight.out || r >= n_rows) return;
  float sum = parts[mine * n_slices][r];
  for (int s = 1; s < n_slices; ++s) sum = sum + parts[mine * n_slices + s][r];
  p.y[(first + r) * p.y_stride + out] = sum;
}

template <NativeForm form>
void launch(device::Stream& stream, const NativeProductParams& p, int n_slices) {
  const int rows = p.n_rows == 1 ? 1 : p.n_rows == 2 ? 2 : p.n_rows <= 4 ? 4 : 8;
  const int64_t n_outputs = kWarps / n_slices;
  const dim3 grid(static_cast<unsigned>((p.weight.out + n_outputs - 1) / n_outputs), static_cast<unsigned>((p.n_rows + rows - 1) / rows));
  switch (rows) {
    case 1: native_product_kernel<form, 1><<<grid, 32 * kWarps, 0, stream.handle()>>>(p, n_slices); break;
    case 2: native_product_kernel<form, 2><<<grid, 32 * kWarps, 0, stream.handle()>>>(p, n_slices); break;
    case 4: native_product_kernel<form, 4><<<grid, 32 * kWarps, 0, stream.handle()>>>(p, n_slices); break;
    default: native_product_kernel<form, 8><<<grid, 32 * kWarps, 0, stream.handle()>>>(p, n_slices); break;
  }
}

}  // namespace

bool can_multiply_fast(const NativeWeight& w, const float* x, int64_t x_stride) {
  const bool has_blocks = w.form == NativeForm::kFp8;
  return w.in % kLaneInputs == 0 && x_stride % kLaneInputs == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(w.weight) % 16 == 0 && (!has_blocks || w.block_cols % kLaneInputs == 0);
}

Status multiply_native_fast(device::Stream& stream, const NativeProductParams& p) {
  if (p.n_rows == 0 || p.weight.out == 0) return ok_status();
  if (!can_multiply_fast(p.weight, p.x, p.x_stride) || p.n_rows > 8 * int64_t{65535}) {
    return invalid_argument("product of " + std::to_string(p.n_rows) + " rows of " + std::to_string(p.weight.in) +
                            " inputs: expected multiples of 8 inputs, aligned, and at most 524280 rows");
  }
  const int n_slices = slices_for(p.weight.in, p.weight.out);
  switch (p.weight.form) {
    case NativeForm::kF32: launch<NativeForm::kF32>(stream, p, n_slices); break;
    case NativeForm::kF16: launch<NativeForm::kF16>(stream, p, n_slices); break;
    case NativeForm::kBf16: launch<NativeForm::kBf16>(stream, p, n_slices); break;
    case NativeForm::kFp8: launch<NativeForm::kFp8>(stream, p, n_slices); break;
    case NativeForm::kMxfp4: launch<NativeForm::kMxfp4>(stream, p, n_slices); break;
  }
  return stream.launched("native_product_kernel");
}

}  // namespace espalier::ops::cuda
