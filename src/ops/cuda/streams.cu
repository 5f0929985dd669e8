#include "ops/cuda/streams.h"

#include "ops/cuda/lanes.cuh"
#include "ops/cuda/streams_of_four.cuh"
#include "ops/scalar_math.h"

namespace espalier::ops::cuda {
namespace {

// A block per row. The first n*n threads hold one element each of the mixing matrix; all of them walk through Sinkhorn together and
// sum rows and columns in ascending order.
template <Order order>
__global__ __launch_bounds__(kRowThreads) void mhc_coefficients_kernel(MhcCoefficientsParams p) {
  constexpr int kMaxMix = static_cast<int>(kMaxStreams * (2 + kMaxStreams));
  __shared__ float m[kMaxMix], c[kMaxStreams * kMaxStreams], shared_r;
  const int64_t t = blockIdx.x;
  const int n = static_cast<int>(p.n_streams), width = n * (2 + n), thread = static_cast<int>(threadIdx.x);
  const float r0 = block_inverse_rms<order>(p.h + t * n * p.d_model, n * p.d_model, p.norm_eps);
  if (thread == 0) shared_r = r0;
  __syncthreads();
  if (thread < width) {
    const float scale = p.scale[thread < n ? 0 : thread < 2 * n ? 1 : 2];
    m[thread] = p.dots[t * width + thread] * shared_r * scale + p.base[thread];
  }
  __syncthreads();
  if (thread < n) {
    p.pre[t * n + thread] = sigmoid_f(m[thread]) + p.hc_eps;
    p.post[t * n + thread] = 2.0f * sigmoid_f(m[n + thread]);
  }
  const bool is_mine = thread < n * n;
  const int row = is_mine ? thread / n : 0, column = is_mine ? thread % n : 0;
  const float* logits = m + 2 * n;
  float top = logits[row * n];
  for (int j = 1; j < n; ++j) top = logits[row * n + j] > top ? logits[row * n + j] : top;
  float mine = static_cast<float>(exp_d(static_cast<double>(logits[row * n + column] - top)));
  const auto publish = [&] {
    __syncthreads();
    if (is_mine) c[thread] = mine;
    __syncthreads();
  };
  const auto row_sum = [&] {
    float sum = 0;
    for (int j = 0; j < n; ++j) sum += c[row * n + j];
    return sum;
  };
  publish();
  mine = mine / row_sum() + p.hc_eps;
  for (int round = 0; round < p.sinkhorn_iters; ++round) {
    if (round > 0) {
      publish();
      mine = mine / (row_sum() + p.hc_eps);
    }
    publish();
    float sum = 0;
    for (int i = 0; i < n; ++i) sum += c[i * n + column];
    mine = mine / (sum + p.hc_eps);
  }
  if (is_mine) p.comb[t * n * n + thread] = mine;
}

__global__ __launch_bounds__(kRowThreads) void mhc_collapse_kernel(MhcCollapseParams p) {
  const int64_t n = p.n_rows * p.d_model;
  for (int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; at < n; at += int64_t{gridDim.x} * blockDim.x) {
    const int64_t t = at / p.d_model, d = at % p.d_model;
    const float* h = p.h + t * p.n_streams * p.d_model + d;
    const float* w = p.weights + t * p.n_streams;
    float sum = w[0] * h[0];
    for (int64_t c = 1; c < p.n_streams; ++c) sum = sum + w[c] * h[c * p.d_model];
    p.out[at] = sum;
  }
}

// A block per row; the collapsed row lies in p.out between the two steps.
template <Order order>
__global__ __launch_bounds__(kRowThreads) void mhc_collapse_normalised_kernel(MhcCollapseParams p, const float* weight, double eps) {
  __shared__ float shared_r;
  const int64_t t = blockIdx.x, d_model = p.d_model;
  const float* w = p.weights + t * p.n_streams;
  float* out = p.out + t * d_model;
  for (int64_t d = threadIdx.x; d < d_model; d += blockDim.x) {
    const float* h = p.h + t * p.n_streams * d_model + d;
    float sum = w[0] * h[0];
    for (int64_t c = 1; c < p.n_streams; ++c) sum = sum + w[c] * h[c * d_model];
    out[d] = sum;
  }
  __syncthreads();
  const float r0 = block_inverse_rms<order>(out, d_model, eps);
  if (threadIdx.x == 0) shared_r = r0;
  __syncthreads();
  const float r = shared_r;
  for (int64_t d = threadIdx.x; d < d_model; d += blockDim.x) out[d] = weight[d] * (out[d] * r);
}

bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

__global__ __launch_bounds__(kRowThreads) void mhc_expand_kernel(MhcExpandParams p) {
  const int64_t s = p.n_streams, n = p.n_rows * s * p.d_model;
  for (int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; at < n; at += int64_t{gridDim.x} * blockDim.x) {
    const int64_t d = at % p.d_model, j = at / p.d_model % s, t = at / p.d_model / s;
    float sum = p.post[t * s + j] * p.y[t * p.d_model + d];
    for (int64_t i = 0; i < s; ++i) sum = sum + p.comb[(t * s + i) * s + j] * p.h[(t * s + i) * p.d_model + d];
    p.out[at] = sum;
  }
}

// A block per row and stream. In the CPU's order warp 0's first half sums the dot product, warp 1's the stream's squares, warp 2's the key's.
template <Order order>
__global__ __launch_bounds__(kRowThreads) void engram_gate_kernel(EngramGateParams p) {
  __shared__ double sums[3];
  __shared__ float shared_gate;
  const int64_t d_model = p.d_model, t = blockIdx.x / p.n_streams, c = blockIdx.x % p.n_streams;
  const float* kv = p.kv + t * (p.n_streams + 1) * d_model;
  const float* value = kv + p.n_streams * d_model;
  const float* key = kv + c * d_model;
  float* h = p.h + (t * p.n_streams + c) * d_model;
  const float* q = p.q_weight + c * d_model;
  const float* k = p.k_weight + c * d_model;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  if (order == Order::kFast) {
    float dot = 0, of_stream = 0, of_key = 0;
    for (int64_t i = threadIdx.x; i < d_model; i += blockDim.x) {
      dot = fmaf(h[i] * q[i], key[i] * k[i], dot);
      of_stream = fmaf(h[i], h[i], of_stream);
      of_key = fmaf(key[i], key[i], of_key);
    }
    dot = block_sum_fast(dot), of_stream = block_sum_fast(of_stream), of_key = block_sum_fast(of_key);
    if (threadIdx.x == 0) sums[0] = dot, sums[1] = of_stream, sums[2] = of_key;
  } else if (warp < 3 && lane < 16) {
    double sum = 0;
#pragma unroll 4
    for (int64_t i = lane; i < d_model; i += 16) {
      double term;
      if (warp == 0) {
        const double a = static_cast<double>(h[i]) * static_cast<double>(key[i]);
        const double b = static_cast<double>(q[i]) * static_cast<double>(k[i]);
        term = a * b;
      } else {
        const double v = static_cast<double>(warp == 1 ? h[i] : key[i]);
        term = v * v;
      }
      sum = sum + term;
    }
    sum = tree_of_16(sum, 0x0000FFFFu);
    if (lane == 0) sums[warp] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const double d = static_cast<double>(d_model);
    double dot = sums[0];
    dot *= 1.0 / sqrt(sums[1] / d + p.norm_eps);
    dot *= 1.0 / sqrt(sums[2] / d + p.norm_eps);
    dot *= 1.0 / sqrt(d);
    const double size = sqrt(fmax(fabs(dot), 1e-6));
    shared_gate = static_cast<float>(sigmoid_d(copysign(size, dot)));
  }
  __syncthreads();
  const float gate = shared_gate;
  for (int64_t i = threadIdx.x; i < d_model; i += blockDim.x) h[i] = h[i] + gate * value[i];
}

}  // namespace

Status mhc_coefficients(device::Stream& stream, const MhcCoefficientsParams& p, Order order) {
  if (p.n_rows == 0) return ok_status();
  if (p.n_streams < 1 || p.n_streams > kMaxStreams) {
    return invalid_argument("mhc_coefficients: expected 1 to " + std::to_string(kMaxStreams) + " streams, found " +
                            std::to_string(p.n_streams));
  }
  const unsigned n_blocks = static_cast<unsigned>(p.n_rows);
  if (p.n_streams == 4 && (order == Order::kCpu || is_aligned(p.h))) {
    if (order == Order::kFast) {
      mhc_coefficients_of_four_kernel<Order::kFast><<<n_blocks, kWideThreads, 0, stream.handle()>>>(p);
    } else {
      mhc_coefficients_of_four_kernel<Order::kCpu><<<n_blocks, kRowThreads, 0, stream.handle()>>>(p);
    }
  } else if (order == Order::kFast) {
    mhc_coefficients_kernel<Order::kFast><<<static_cast<unsigned>(p.n_rows), kRowThreads, 0, stream.handle()>>>(p);
  } else {
    mhc_coefficients_kernel<Order::kCpu><<<static_cast<unsigned>(p.n_rows), kRowThreads, 0, stream.handle()>>>(p);
  }
  return stream.launched("mhc_coefficients_kernel");
}

Status mhc_collapse(device::Stream& stream, const MhcCollapseParams& p) {
  if (p.n_rows * p.d_model == 0) return ok_status();
  mhc_collapse_kernel<<<grid_for(p.n_rows * p.d_model, kRowThreads), kRowThreads, 0, stream.handle()>>>(p);
  return stream.launched("mhc_collapse_kernel");
}

Status mhc_collapse_normalised(device::Stream& stream, const MhcCollapseParams& p, const float* weight, double eps, Order order) {
  if (p.n_rows * p.d_model == 0) return ok_status();
  if (p.n_rows > 0x7FFFFFFF) return invalid_argument("mhc_collapse: " + std::to_string(p.n_rows) + " rows are too many for one launch");
  const bool is_wide = p.n_streams == 4 && p.d_model % 4 == 0 && p.d_model <= kWideWidth && is_aligned(p.h) && is_aligned(p.weights) &&
                       is_aligned(p.out) && is_aligned(weight);
  if (order == Order::kFast && is_wide) {
    mhc_collapse_four_kernel<<<static_cast<unsigned>(p.n_rows), kWideThreads, 0, stream.handle()>>>(p, weight, eps);
  } else if (order == Order::kFast) {
    mhc_collapse_normalised_kernel<Order::kFast><<<static_cast<unsigned>(p.n_rows), kRowThreads, 0, stream.handle()>>>(p, weight, eps);
  } else {
    mhc_collapse_normalised_kernel<Order::kCpu><<<static_cast<unsigned>(p.n_rows), kRowThreads, 0, stream.handle()>>>(p, weight, eps);
  }
  return stream.launched("mhc_collapse_normalised_kernel");
}

Status mhc_expand(device::Stream& stream, const MhcExpandParams& p) {
  if (p.n_rows * p.n_streams * p.d_model == 0) return ok_status();
  if (p.n_streams == 4 && p.d_model % 4 == 0 && p.d_model <= int64_t{1} << 24 && p.n_rows <= 65535 && is_aligned(p.h) && is_aligned(p.y) &&
      is_aligned(p.out)) {
    const dim3 grid(static_cast<unsigned>((p.d_model / 4 + kExpandThreads - 1) / kExpandThreads), static_cast<unsigned>(p.n_rows));
    mhc_expand_four_kernel<<<grid, kExpandThreads, 0, stream.handle()>>>(p);
    return stream.launched("mhc_expand_kernel");
  }
  mhc_expand_kernel<<<grid_for(p.n_rows * p.n_streams * p.d_model, kRowThreads), kRowThreads, 0, stream.handle()>>>(p);
  return stream.launched("mhc_expand_kernel");
}

Status engram_gate(device::Stream& stream, const EngramGateParams& p, Order order) {
  if (p.n_rows * p.n_streams == 0) return ok_status();
  const unsigned n_blocks = static_cast<unsigned>(p.n_rows * p.n_streams);
  if (order == Order::kFast) {
    engram_gate_kernel<Order::kFast><<<n_blocks, kRowThreads, 0, stream.handle()>>>(p);
  } else {
    engram_gate_kernel<Order::kCpu><<<n_blocks, kRowThreads, 0, stream.handle()>>>(p);
  }
  return stream.launched("engram_gate_kernel");
}

}  // namespace espalier::ops::cuda
