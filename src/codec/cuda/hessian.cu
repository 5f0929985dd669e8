#include "codec/cuda/hessian.h"

#include <algorithm>

#include "base/check.h"
#include "device/cuda_status.cuh"

namespace espalier::codec {
namespace {

constexpr int kEdge = 128;  // of a block's square of the result
constexpr int kDepth = 16;  // rows in shared memory at a time

__global__ void find_finite_rows(const float* x, int k, uint8_t* finite) {
  const float* row = x + int64_t{blockIdx.x} * k;
  bool bad = false;
  for (int i = static_cast<int>(threadIdx.x); i < k; i += static_cast<int>(blockDim.x)) bad = bad || !isfinite(row[i]);
  const int any = __syncthreads_or(bad);
  if (threadIdx.x == 0) finite[blockIdx.x] = any == 0;
}

// Rows index[b] of x, times scale[b], to rows of the chunk.
__global__ void gather_rows(const float* x, const int* index, const float* scale, int k, float* chunk) {
  const int b = static_cast<int>(blockIdx.x);
  for (int i = static_cast<int>(threadIdx.x); i < k; i += static_cast<int>(blockDim.x)) {
    chunk[int64_t{b} * k + i] = __fmul_rn(scale[b], x[int64_t{index[b]} * k + i]);
  }
}

// sum += chunk^T chunk on and below the diagonal, 8x8 numbers a thread.
__global__ void __launch_bounds__(256) add_products(const float* chunk, int n_rows, int k, double* sum) {
  if (blockIdx.x > blockIdx.y) return;
  __shared__ float left[kDepth][kEdge], right[kDepth][kEdge];
  const int thread = static_cast<int>(threadIdx.x);
  const int tx = thread % 16, ty = thread / 16;
  const int row0 = static_cast<int>(blockIdx.y) * kEdge, col0 = static_cast<int>(blockIdx.x) * kEdge;
  float acc[8][8] = {};
  for (int t0 = 0; t0 < n_rows; t0 += kDepth) {
    __syncthreads();
    for (int e = thread; e < kDepth * kEdge; e += 256) {
      const int t = e / kEdge, c = e % kEdge;
      const float* row = chunk + int64_t{t0 + t} * k;
      left[t][c] = t0 + t < n_rows && row0 + c < k ? row[row0 + c] : 0.0f;
      right[t][c] = t0 + t < n_rows && col0 + c < k ? row[col0 + c] : 0.0f;
    }
    __syncthreads();
    const int depth = min(kDepth, n_rows - t0);
    for (int t = 0; t < depth; ++t) {
      float a[8], b[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        a[i] = left[t][ty + 16 * i];
        b[i] = right[t][tx + 16 * i];
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) acc[i][j] = __fmaf_rn(a[i], b[j], acc[i][j]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int row = row0 + ty + 16 * i, col = col0 + tx + 16 * j;
      if (row < k && col <= row)
        sum[int64_t{row} * k + col] = __dadd_rn(sum[int64_t{row} * k + col], double{acc[i][j]});
    }
  }
}

__global__ void mirror(double* sum, int k) {
  const int col = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int row = static_cast<int>(blockIdx.y);
  if (col > row && col < k) sum[int64_t{row} * k + col] = sum[int64_t{col} * k + row];
}

}  // namespace

Result<DeviceHessian> DeviceHessian::create(device::Stream& stream, int64_t k) {
  CHECK(k > 0) << "Hessian of " << k << " channels";
  DeviceHessian out;
  out.k_ = k;
  ASSIGN_OR_RETURN(out.chunk_, device::DeviceArray<float>::allocate(
                                   stream.device(), static_cast<size_t>(kChunkRows * k), "calibration rows"));
  ASSIGN_OR_RETURN(out.sum_,
                   device::DeviceArray<double>::allocate(stream.device(), static_cast<size_t>(k * k), "Hessian"));
  RETURN_IF_ERROR(stream.fill_bytes(out.sum_.data(), 0, static_cast<size_t>(k * k) * sizeof(double)));
  return Result<DeviceHessian>(std::move(out));
}

Status DeviceHessian::add(device::Stream& stream, const float* x, int64_t n_rows, const float* scale) {
  if (n_rows == 0) return ok_status();
  const device::ScopedDevice scope(stream.device());
  ASSIGN_OR_RETURN(const device::DeviceArray<uint8_t> flags,
                   device::DeviceArray<uint8_t>::allocate(stream.device(), static_cast<size_t>(n_rows), "flags"));
  find_finite_rows<<<static_cast<unsigned>(n_rows), 256, 0, stream.handle()>>>(x, static_cast<int>(k_), flags.data());
  RETURN_IF_ERROR(stream.launched("find_finite_rows"));
  ASSIGN_OR_RETURN(const std::vector<uint8_t> finite, flags.download(stream));
  std::vector<int> index;
  std::vector<float> factors;
  for (int64_t r = 0; r < n_rows; ++r) {
    if (finite[static_cast<size_t>(r)] == 0) {
      ++dropped_;
      continue;
    }
    index.push_back(static_cast<int>(r));
    factors.push_back(scale == nullptr ? 1.0f : scale[r]);
    const double w = double{factors.back()} * double{factors.back()};
    ++rows_;
    weight_sum_ += w;
    weight_square_sum_ += w * w;
  }
  if (index.empty()) return ok_status();
  ASSIGN_OR_RETURN(const device::DeviceArray<int> indices, device::DeviceArray<int>::upload(stream, index, "rows"));
  ASSIGN_OR_RETURN(const device::DeviceArray<float> scales,
                   device::DeviceArray<float>::upload(stream, factors, "row factors"));
  for (int64_t done = 0; done < static_cast<int64_t>(index.size());) {
    const int64_t take = std::min(kChunkRows - filled_, static_cast<int64_t>(index.size()) - done);
    gather_rows<<<static_cast<unsigned>(take), 256, 0, stream.handle()>>>(
        x, indices.data() + done, scales.data() + done, static_cast<int>(k_), chunk_.data() + filled_ * k_);
    RETURN_IF_ERROR(stream.launched("gather_rows"));
    filled_ += take;
    done += take;
    if (filled_ == kChunkRows) RETURN_IF_ERROR(flush(stream));
  }
  return stream.synchronize();  // the lists above go
}

Status DeviceHessian::flush(device::Stream& stream) {
  if (filled_ == 0) return ok_status();
  const unsigned edge = static_cast<unsigned>((k_ + kEdge - 1) / kEdge);
  add_products<<<dim3(edge, edge), 256, 0, stream.handle()>>>(chunk_.data(), static_cast<int>(filled_),
                                                              static_cast<int>(k_), sum_.data());
  filled_ = 0;
  return stream.launched("add_products");
}

Result<const double*> DeviceHessian::finish(device::Stream& stream) {
  const device::ScopedDevice scope(stream.device());
  RETURN_IF_ERROR(flush(stream));
  mirror<<<dim3(static_cast<unsigned>((k_ + 255) / 256), static_cast<unsigned>(k_)), 256, 0, stream.handle()>>>(
      sum_.data(), static_cast<int>(k_));
  RETURN_IF_ERROR(stream.launched("mirror"));
  return static_cast<const double*>(sum_.data());
}

}  // namespace espalier::codec
