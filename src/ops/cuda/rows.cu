#include "ops/cuda/rows.h"

#include "ops/cuda/lanes.cuh"
#include "ops/scalar_math.h"

namespace espalier::ops::cuda {
namespace {

constexpr int64_t kMaxRows = 0x7FFFFFFF;  // one block a row

Status check_rows(const char* what, int64_t n_rows) {
  if (n_rows <= kMaxRows) return ok_status();
  return invalid_argument(std::string(what) + ": expected at most " + std::to_string(kMaxRows) + " rows, found " + std::to_string(n_rows));
}

template <Order order>
__global__ __launch_bounds__(kRowThreads) void rms_norm_kernel(RmsNormParams p) {
  const int64_t t = blockIdx.x;
  const float* x = p.x + t * p.d;
  __shared__ float shared_r;
  const float r0 = block_inverse_rms<order>(x, p.d, p.eps);
  if (threadIdx.x == 0) shared_r = r0;
  __syncthreads();
  const float r = shared_r;
  for (int64_t i = threadIdx.x; i < p.d; i += blockDim.x) p.y[t * p.d + i] = p.weight[i] * (x[i] * r);
}

constexpr int kRopeHeads = 16;  // of a block

// A block per row and kRopeHeads heads: the table of sines and cosines first (double, as on the CPU), then every head uses it.
__global__ __launch_bounds__(kRowThreads) void rope_kernel(RopeParams p) {
  extern __shared__ float table[];  // [2 * pairs]
  const int64_t t = blockIdx.x;
  const int64_t pairs = p.rope_dim / 2;
  const float position = static_cast<float>(p.positions[t]);
  for (int64_t i = threadIdx.x; i < pairs; i += blockDim.x) {
    double s, c;
    sincos_d(static_cast<double>(position * p.frequencies[i]), &s, &c);
    table[2 * i] = static_cast<float>(c);
    table[2 * i + 1] = static_cast<float>(p.is_inverse ? -s : s);
  }
  __syncthreads();
  const int64_t first = int64_t{blockIdx.y} * kRopeHeads, n_heads = p.n_heads - first < kRopeHeads ? p.n_heads - first : kRopeHeads;
  const uint32_t n = static_cast<uint32_t>(n_heads * pairs), n_pairs = static_cast<uint32_t>(pairs);
  for (uint32_t at = threadIdx.x; at < n; at += blockDim.x) {
    const uint32_t h = at / n_pairs, i = at % n_pairs;
    float* x = p.x + (t * p.n_heads + first + h) * p.head_dim + p.head_dim - p.rope_dim;
    const float c = table[2 * i], s = table[2 * i + 1];
    const float u = x[2 * i], v = x[2 * i + 1];
    x[2 * i] = u * c - v * s;
    x[2 * i + 1] = u * s + v * c;
  }
}

__global__ __launch_bounds__(kRowThreads) void swiglu_kernel(SwigluParams p) {
  const int64_t n = p.n_rows * p.d;
  for (int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; at < n; at += int64_t{gridDim.x} * blockDim.x) {
    const float gate = p.gate != nullptr ? p.gate[at / p.d] : 1.0f;
    float a = p.a[at], u = p.u[at];
    a = a > p.limit ? p.limit : a;
    u = u > p.limit ? p.limit : u;
    u = u < -p.limit ? -p.limit : u;
    const double ad = static_cast<double>(a);
    const float s = static_cast<float>(ad / (1.0 + exp_d(-ad)));
    p.z[at] = s * u * gate;
  }
}

// 2^ceil(log2(x)) from the float's bits, for x > 0.
__device__ __forceinline__ float power_of_two_at_least(float x) {
  const uint32_t u = __float_as_uint(x);
  return __uint_as_float((((u >> 23) & 0xFFu) + ((u & 0x7FFFFFu) != 0 ? 1u : 0u)) << 23);
}

__device__ __forceinline__ float clamp_to(float x, float limit) {
  x = x > limit ? limit : x;
  return x < -limit ? -limit : x;
}

// Nearest e4m3 and e2m1 values, ties to even, by adding 1.5 * 2^23 steps; see ops/cpu/kernels_inl.h.
__device__ __forceinline__ float nearest_e4m3(float x) {
  const uint32_t u = __float_as_uint(x) & 0x7F800000u;
  const uint32_t step_bits = (u > (121u << 23) ? u : (121u << 23)) - (3u << 23);
  const float big = __uint_as_float(step_bits) * 12582912.0f;
  return x < 0.0f ? (x - big) + big : (x + big) - big;
}

__device__ __forceinline__ float nearest_e2m1(float x) {
  const float a = fabsf(x);
  const float step = a < 2.0f ? 0.5f : a < 4.0f ? 1.0f : 2.0f;
  const float big = step * 12582912.0f;
  const float r = (a + big) - big;
  return x < 0.0f ? 0.0f - r : r;
}

// A thread per value; a group of 16 or 32 is half a warp or a whole one. Lanes past the end of a row count as zero.
__global__ __launch_bounds__(kRowThreads) void fake_quant_kernel(FakeQuantParams p, int group, int64_t groups_per_row) {
  const int64_t n = p.n_rows * groups_per_row * group, last = (n + 31) / 32 * 32;  // whole warps come to the shuffles
  for (int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; at < last; at += int64_t{gridDim.x} * blockDim.x) {
    const int64_t g = group == 32 ? at >> 5 : at >> 4, row = g / groups_per_row;
    const int64_t i = (g - row * groups_per_row) * group + (at & (group - 1));
    const bool is_used = at < n && i < p.d;
    float* x = p.x + row * p.d + i;
    const float value = is_used ? *x : 0.0f, size = fabsf(value);
    float a = size > 0.0f ? size : 0.0f;
    for (int w = group / 2; w >= 1; w /= 2) {
      const float other = __shfl_xor_sync(0xFFFFFFFFu, a, w);
      a = other > a ? other : a;
    }
    float out;
    if (p.format == FakeQuantFormat::kAct) {
      const float s = power_of_two_at_least((a > 1e-4f ? a : 1e-4f) * (1.0f / 448.0f));
      out = nearest_e4m3(clamp_to(value / s, 448.0f)) * s;
    } else {
      float s;
      if (p.format == FakeQuantFormat::kFp4) {
        const float low = 6.0f * 0x1.0p-126f;
        s = power_of_two_at_least((a > low ? a : low) * (1.0f / 6.0f));
      } else {
        const float low = 6.0f * 0x1.0p-9f;
        s = nearest_e4m3(clamp_to((a > low ? a : low) / 6.0f, 448.0f));
      }
      out = nearest_e2m1(clamp_to(value / s, 6.0f)) * s;
    }
    if (is_used) *x = out;
  }
}

__global__ __launch_bounds__(kRowThreads) void round_to_bf16_kernel(float* x, int64_t n) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x) x[i] = round_bf16(x[i]);
}

}  // namespace

Status rms_norm(device::Stream& stream, const RmsNormParams& p, Order order) {
  if (p.n_rows == 0 || p.d == 0) return ok_status();
  RETURN_IF_ERROR(check_rows("rms_norm", p.n_rows));
  if (order == Order::kFast) {
    rms_norm_kernel<Order::kFast><<<static_cast<unsigned>(p.n_rows), kRowThreads, 0, stream.handle()>>>(p);
  } else {
    rms_norm_kernel<Order::kCpu><<<static_cast<unsigned>(p.n_rows), kRowThreads, 0, stream.handle()>>>(p);
  }
  return stream.launched("rms_norm_kernel");
}

Status rope(device::Stream& stream, const RopeParams& p) {
  if (p.n_rows == 0 || p.rope_dim < 2 || p.n_heads == 0) return ok_status();
  RETURN_IF_ERROR(check_rows("rope", p.n_rows));
  if (p.rope_dim > 8192) {
    return invalid_argument("rope: expected at most 8192 rotated channels, found " + std::to_string(p.rope_dim));
  }
  if (p.n_heads > int64_t{65535} * kRopeHeads) return invalid_argument("rope: " + std::to_string(p.n_heads) + " heads are too many for one launch");
  const size_t shared = static_cast<size_t>(p.rope_dim / 2 * 2) * sizeof(float);
  const dim3 grid(static_cast<unsigned>(p.n_rows), static_cast<unsigned>((p.n_heads + kRopeHeads - 1) / kRopeHeads));
  rope_kernel<<<grid, kRowThreads, shared, stream.handle()>>>(p);
  return stream.launched("rope_kernel");
}

Status swiglu(device::Stream& stream, const SwigluParams& p) {
  if (p.n_rows * p.d == 0) return ok_status();
  swiglu_kernel<<<grid_for(p.n_rows * p.d, kRowThreads), kRowThreads, 0, stream.handle()>>>(p);
  return stream.launched("swiglu_kernel");
}

Status fake_quant(device::Stream& stream, const FakeQuantParams& p) {
  if (p.n_rows * p.d == 0) return ok_status();
  const int64_t group = fake_quant_group(p.format), per_row = (p.d + group - 1) / group;
  fake_quant_kernel<<<grid_for(p.n_rows * per_row * group, kRowThreads), kRowThreads, 0, stream.handle()>>>(p, static_cast<int>(group), per_row);
  return stream.launched("fake_quant_kernel");
}

Status round_to_bf16(device::Stream& stream, float* x, int64_t n) {
  if (n == 0) return ok_status();
  round_to_bf16_kernel<<<grid_for(n, kRowThreads), kRowThreads, 0, stream.handle()>>>(x, n);
  return stream.launched("round_to_bf16_kernel");
}

}  // namespace espalier::ops::cuda
