#include "codec/cuda/factor.h"

#include <cuda_fp16.h>

#include "base/check.h"
#include "codec/hadamard.h"
#include "codec/trellis.h"
#include "device/cuda_status.cuh"

namespace espalier::codec {
namespace {

constexpr int kPanel = 64;

unsigned blocks_of(int64_t n, int64_t per_block) {
  return static_cast<unsigned>((n + per_block - 1) / per_block);
}

// ---- rotation ----

__global__ void scale_hessian(const double* h, const double* su, double damping, int k, double* out) {
  const int j = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int i = static_cast<int>(blockIdx.y);
  if (j >= k) return;
  const int64_t at = int64_t{i} * k + j;
  const double value = __dadd_rn(h[at], i == j ? damping : 0.0);
  out[at] = __dmul_rn(__dmul_rn(value, su[i]), su[j]);
}

__global__ void scale_weight(const float* weight, const double* su, const double* sv, int n, double* out) {
  const int j = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int i = static_cast<int>(blockIdx.y);
  if (j >= n) return;
  const int64_t at = int64_t{i} * n + j;
  out[at] = su[i] != 0 && sv[j] != 0 ? __ddiv_rn(__ddiv_rn(double{weight[at]}, su[i]), sv[j]) : 0.0;
}

// One warp per 128 numbers of a row; lane t holds four neighbours. Stages of distance 1, 2, 4, ... 64, then one
// multiplication.
__global__ void rotate_rows(double* a, int64_t n_chunks, bool normalised) {
  const int64_t chunk = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (chunk >= n_chunks) return;
  double* p = a + chunk * kBlock + 4 * lane;
  double v[4] = {p[0], p[1], p[2], p[3]};
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const double x = v[i], y = v[i + 1];
    v[i] = __dadd_rn(x, y);
    v[i + 1] = __dsub_rn(x, y);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const double x = v[i], y = v[i + 2];
    v[i] = __dadd_rn(x, y);
    v[i + 2] = __dsub_rn(x, y);
  }
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const double other = __shfl_xor_sync(0xFFFFFFFFu, v[i], distance);
      v[i] = (lane & distance) == 0 ? __dadd_rn(v[i], other) : __dsub_rn(other, v[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) p[i] = normalised ? __dmul_rn(v[i], kHadamardScaleF64) : v[i];
}

// 128 rows of 16 columns per block of 256 threads, in shared memory.
__global__ void rotate_columns(double* a, int cols) {
  __shared__ double tile[kBlock][17];
  const int c = static_cast<int>(threadIdx.x) % 16;
  const int r0 = static_cast<int>(threadIdx.x) / 16;
  double* p = a + int64_t{blockIdx.y} * kBlock * cols + blockIdx.x * 16 + c;
  for (int r = r0; r < kBlock; r += 16) tile[r][c] = p[int64_t{r} * cols];
  for (int distance = 1; distance < kBlock; distance *= 2) {
    __syncthreads();
    for (int i = r0; i < kBlock / 2; i += 16) {
      const int r = i / distance * 2 * distance + i % distance;
      const double x = tile[r][c];
      const double y = tile[r + distance][c];
      tile[r][c] = __dadd_rn(x, y);
      tile[r + distance][c] = __dsub_rn(x, y);
    }
  }
  __syncthreads();
  for (int r = r0; r < kBlock; r += 16) p[int64_t{r} * cols] = __dmul_rn(tile[r][c], kHadamardScaleF64);
}

// normalised_rows: otherwise the rows' 1/sqrt(128) is left out.
Status rotate(device::Stream& stream, double* a, int64_t rows, int64_t cols, bool normalised_rows = true) {
  CHECK(rows % kBlock == 0 && cols % kBlock == 0) << "rotation of [" << rows << ", " << cols << "]";
  rotate_rows<<<blocks_of(rows * cols / kBlock, 8), 256, 0, stream.handle()>>>(a, rows * cols / kBlock,
                                                                               normalised_rows);
  RETURN_IF_ERROR(stream.launched("rotate_rows"));
  rotate_columns<<<dim3(static_cast<unsigned>(cols / 16), static_cast<unsigned>(rows / kBlock)), 256, 0,
                   stream.handle()>>>(a, static_cast<int>(cols));
  return stream.launched("rotate_columns");
}

// ---- products: every element one chain over ascending depth ----

// 256 threads, thread (ty, tx) has rows ty + 16*i and columns tx + 16*j. The operands of a chunk of kDepth are in
// shared memory.
constexpr int kTileEdge = 64;
constexpr int kDepth = 16;

// out -= left^T * right on and above the diagonal's tiles, left [depth, rows], right [depth, cols].
__global__ void __launch_bounds__(256)
    subtract_product(const double* left, const double* right, int64_t stride, double* out, int size, int depth) {
  if (blockIdx.x < blockIdx.y) return;
  __shared__ double l[kDepth][kTileEdge + 1];
  __shared__ double r[kDepth][kTileEdge + 1];
  const int thread = static_cast<int>(threadIdx.x);
  const int tx = thread % 16;
  const int ty = thread / 16;
  const int row0 = static_cast<int>(blockIdx.y) * kTileEdge;
  const int col0 = static_cast<int>(blockIdx.x) * kTileEdge;
  double sum[4][4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = row0 + ty + 16 * i, col = col0 + tx + 16 * j;
      if (row < size && col < size) sum[i][j] = out[row * stride + col];
    }
  }
  for (int d0 = 0; d0 < depth; d0 += kDepth) {
    __syncthreads();
    for (int e = thread; e < kDepth * kTileEdge; e += 256) {
      const int wide = e % kTileEdge, deep = e / kTileEdge;
      l[deep][wide] = row0 + wide < size ? -left[(d0 + deep) * stride + row0 + wide] : 0.0;
      r[deep][wide] = col0 + wide < size ? right[(d0 + deep) * stride + col0 + wide] : 0.0;
    }
    __syncthreads();
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      double a[4], b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = l[d][ty + 16 * i];
#pragma unroll
      for (int j = 0; j < 4; ++j) b[j] = r[d][tx + 16 * j];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] = __dadd_rn(sum[i][j], __dmul_rn(b[j], a[i]));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = row0 + ty + 16 * i, col = col0 + tx + 16 * j;
      if (row < size && col < size) out[row * stride + col] = sum[i][j];
    }
  }
}

// out = left * right for large operands whose sizes are multiples of the tile: [128, 64] a block, rows ty + 16*i and columns
// tx + 16*j of it a thread. The next operands are on their way to registers while these are multiplied. The same chains as above.
constexpr int kWideRows = 128;
constexpr int kWideDepth = 8;

__global__ void __launch_bounds__(256, 2)
    wide_product(const double* left, const double* right, double* out, int cols, int depth) {
  __shared__ double l[2][kWideDepth][kWideRows + 2];
  __shared__ double r[2][kWideDepth][kTileEdge];
  const int thread = static_cast<int>(threadIdx.x);
  const int tx = thread % 16, ty = thread / 16;
  const int64_t row0 = int64_t{blockIdx.y} * kWideRows, col0 = int64_t{blockIdx.x} * kTileEdge;
  // A thread brings four neighbours of a row of the left operand, and two of the right one.
  const double* from_left = left + (row0 + thread / 2) * depth + thread % 2 * 4;
  const double* from_right = right + int64_t{thread / 32} * cols + col0 + thread % 32 * 2;
  double2 next_left[2], next_right;
  const auto request = [&](int d0) {
    next_left[0] = *reinterpret_cast<const double2*>(from_left + d0);
    next_left[1] = *reinterpret_cast<const double2*>(from_left + d0 + 2);
    next_right = *reinterpret_cast<const double2*>(from_right + int64_t{d0} * cols);
  };
  const auto keep = [&](int at) {
    const int row = thread / 2, d = thread % 2 * 4;
    l[at][d][row] = next_left[0].x, l[at][d + 1][row] = next_left[0].y;
    l[at][d + 2][row] = next_left[1].x, l[at][d + 3][row] = next_left[1].y;
    *reinterpret_cast<double2*>(&r[at][thread / 32][thread % 32 * 2]) = next_right;
  };
  double sum[8][4] = {};
  request(0);
  keep(0);
  __syncthreads();
  int at = 0;
  for (int d0 = 0; d0 < depth; d0 += kWideDepth) {
    const bool has_next = d0 + kWideDepth < depth;
    if (has_next) request(d0 + kWideDepth);
#pragma unroll
    for (int d = 0; d < kWideDepth; ++d) {
      double a[8], b[4];
#pragma unroll
      for (int i = 0; i < 8; ++i) a[i] = l[at][d][ty + 16 * i];
#pragma unroll
      for (int j = 0; j < 4; ++j) b[j] = r[at][d][tx + 16 * j];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] = __dadd_rn(sum[i][j], __dmul_rn(b[j], a[i]));
      }
    }
    at ^= 1;
    if (has_next) keep(at);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) out[(row0 + ty + 16 * i) * cols + col0 + tx + 16 * j] = sum[i][j];
  }
}

// ---- Cholesky, 64 rows at a time ----

__global__ void factor_block(double* a, int64_t n, int64_t start, int* failed) {
  __shared__ double block[kPanel][kPanel + 1];
  double* corner = a + start * n + start;
  for (int e = static_cast<int>(threadIdx.x); e < kPanel * kPanel; e += static_cast<int>(blockDim.x)) {
    block[e / kPanel][e % kPanel] = corner[e / kPanel * n + e % kPanel];
  }
  for (int p = 0; p < kPanel; ++p) {
    __syncthreads();
    const double pivot = block[p][p];
    if (!(pivot > 0) || !isfinite(pivot)) {
      if (threadIdx.x == 0) *failed = 1;
      return;
    }
    const double root = __dsqrt_rn(pivot);
    __syncthreads();
    for (int j = p + static_cast<int>(threadIdx.x); j < kPanel; j += static_cast<int>(blockDim.x)) {
      block[p][j] = j == p ? root : __ddiv_rn(block[p][j], root);
    }
    __syncthreads();
    const int left = kPanel - 1 - p;
    for (int e = static_cast<int>(threadIdx.x); e < left * left; e += static_cast<int>(blockDim.x)) {
      const int i = p + 1 + e / left, j = p + 1 + e % left;
      if (j >= i) block[i][j] = __dsub_rn(block[i][j], __dmul_rn(block[p][i], block[p][j]));
    }
  }
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < kPanel * kPanel; e += static_cast<int>(blockDim.x)) {
    if (e % kPanel >= e / kPanel) corner[e / kPanel * n + e % kPanel] = block[e / kPanel][e % kPanel];
  }
}

// Rows of the panel right of its block: forward substitution, a thread per column.
__global__ void solve_panel(double* a, int64_t n, int64_t start) {
  extern __shared__ double panel_shared[];
  double(*block)[kPanel] = reinterpret_cast<double(*)[kPanel]>(panel_shared);
  double* x = panel_shared + kPanel * kPanel + threadIdx.x;  // [64] apart by blockDim.x
  const int stride = static_cast<int>(blockDim.x);
  for (int e = static_cast<int>(threadIdx.x); e < kPanel * kPanel; e += stride) {
    block[e / kPanel][e % kPanel] = a[(start + e / kPanel) * n + start + e % kPanel];
  }
  __syncthreads();
  const int64_t j = start + kPanel + int64_t{blockIdx.x} * stride + threadIdx.x;
  if (j >= n) return;
  for (int p = 0; p < kPanel; ++p) x[p * stride] = a[(start + p) * n + j];
  for (int p = 0; p < kPanel; ++p) {
    const double value = __ddiv_rn(x[p * stride], block[p][p]);
    x[p * stride] = value;
#pragma unroll 4
    for (int i = p + 1; i < kPanel; ++i) x[i * stride] = __dsub_rn(x[i * stride], __dmul_rn(block[p][i], value));
  }
  for (int p = 0; p < kPanel; ++p) a[(start + p) * n + j] = x[p * stride];
}

__global__ void feedback_rows(const double* upper, int n, double* feedback) {
  __shared__ double corner[kTile][kTile];
  const int first = static_cast<int>(blockIdx.y) * kTile;
  corner[threadIdx.x / kTile][threadIdx.x % kTile] =
      upper[int64_t{first + static_cast<int>(threadIdx.x) / kTile} * n + first + threadIdx.x % kTile];
  __syncthreads();
  const int s = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (s >= n) return;
  double x[kTile];
#pragma unroll
  for (int j = kTile - 1; j >= 0; --j) {
    double sum = s >= first + kTile ? upper[int64_t{first + j} * n + s] : 0.0;
#pragma unroll
    for (int m = j + 1; m < kTile; ++m) sum = __dsub_rn(sum, __dmul_rn(x[m], corner[j][m]));
    x[j] = s >= first + kTile ? __ddiv_rn(sum, corner[j][j]) : 0.0;
  }
#pragma unroll
  for (int j = 0; j < kTile; ++j) feedback[int64_t{first + j} * n + s] = x[j];
}

// ---- decoding and the true error ----

__global__ void inner_values(const double* weight, const double* error, int64_t size, double* out) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  // weight - error is the codebook value up to the rounding of the error; the value is an fp16 number, so rounding
  // gives it back.
  if (i < size) out[i] = double{__half2float(__double2half(__dsub_rn(weight[i], error[i])))};
}

__global__ void scale_decoded(const double* a, const double* su, const double* sv, int n, float* out) {
  const int j = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int i = static_cast<int>(blockIdx.y);
  if (j >= n) return;
  const int64_t at = int64_t{i} * n + j;
  out[at] =
      static_cast<float>(__dmul_rn(__dmul_rn(__dmul_rn(a[at], kHadamardScaleF64), su[i]), sv[j]));  // as decode_weight
}

__global__ void difference(const float* weight, const float* decoded, int64_t size, double* error, double* wide) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= size) return;
  wide[i] = double{weight[i]};
  error[i] = __dsub_rn(double{weight[i]}, double{decoded[i]});
}

// rows [k]: the inner product of a row, ascending. A warp loads 32 neighbours of its row at a time, one lane adds them
// up.
__global__ void row_sums(const double* a, const double* b, int k, int n, double* rows) {
  const int row = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (row >= k) return;
  double sum = 0;
  for (int j = lane; j < n; j += 32) {
    const double product = __dmul_rn(a[int64_t{row} * n + j], b[int64_t{row} * n + j]);
#pragma unroll
    for (int l = 0; l < 32; ++l) sum = __dadd_rn(sum, __shfl_sync(0xFFFFFFFFu, product, l));
  }
  if (lane == 0) rows[row] = sum;
}

// One chain over the rows for each of the sums.
__global__ void total_sums(const double* rows, int k, double* sums) {
  double sum = 0;
  for (int i = 0; i < k; ++i) sum = __dadd_rn(sum, rows[int64_t{threadIdx.x} * k + i]);
  sums[threadIdx.x] = sum;
}

}  // namespace

Status rotate_hessian_on_device(device::Stream& stream, const double* h, const double* su, double damping, int64_t k,
                                double* out) {
  const device::ScopedDevice scope(stream.device());
  scale_hessian<<<dim3(blocks_of(k, 256), static_cast<unsigned>(k)), 256, 0, stream.handle()>>>(
      h, su, damping, static_cast<int>(k), out);
  RETURN_IF_ERROR(stream.launched("scale_hessian"));
  return rotate(stream, out, k, k);
}

Status rotate_weight_on_device(device::Stream& stream, const float* weight, const double* su, const double* sv,
                               int64_t k, int64_t n, double* out) {
  const device::ScopedDevice scope(stream.device());
  scale_weight<<<dim3(blocks_of(n, 256), static_cast<unsigned>(k)), 256, 0, stream.handle()>>>(
      weight, su, sv, static_cast<int>(n), out);
  RETURN_IF_ERROR(stream.launched("scale_weight"));
  return rotate(stream, out, k, n);
}

Status cholesky_on_device(device::Stream& stream, double* a, int64_t n, int* failed) {
  CHECK(n % kPanel == 0) << n << " rows";
  const device::ScopedDevice scope(stream.device());
  constexpr int kColumns = 64;  // of a block of solve_panel
  constexpr int kShared = (kPanel * kPanel + kPanel * kColumns) * static_cast<int>(sizeof(double));
  ESPALIER_CUDA_TRY("factorisation",
                    cudaFuncSetAttribute(solve_panel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  RETURN_IF_ERROR(stream.fill_bytes(failed, 0, sizeof(int)));
  for (int64_t start = 0; start < n; start += kPanel) {
    factor_block<<<1, 256, 0, stream.handle()>>>(a, n, start, failed);
    RETURN_IF_ERROR(stream.launched("factor_block"));
    const int64_t right = n - start - kPanel;
    if (right == 0) break;
    solve_panel<<<blocks_of(right, kColumns), kColumns, kShared, stream.handle()>>>(a, n, start);
    RETURN_IF_ERROR(stream.launched("solve_panel"));
    const double* panel = a + start * n + start + kPanel;
    const unsigned edge = blocks_of(right, kTileEdge);
    subtract_product<<<dim3(edge, edge), 256, 0, stream.handle()>>>(panel, panel, n, a + (start + kPanel) * (n + 1),
                                                                    static_cast<int>(right), kPanel);
    RETURN_IF_ERROR(stream.launched("subtract_product"));
  }
  return ok_status();
}

Status block_ldl_feedback_on_device(device::Stream& stream, const double* upper, int64_t n, double* feedback) {
  const device::ScopedDevice scope(stream.device());
  feedback_rows<<<dim3(blocks_of(n, 256), static_cast<unsigned>(n / kTile)), 256, 0, stream.handle()>>>(
      upper, static_cast<int>(n), feedback);
  return stream.launched("feedback_rows");
}

Status decode_on_device(device::Stream& stream, const double* weight, const double* error, const double* su,
                        const double* sv, int64_t k, int64_t n, double* scratch, float* out) {
  const device::ScopedDevice scope(stream.device());
  inner_values<<<blocks_of(k * n, 256), 256, 0, stream.handle()>>>(weight, error, k * n, scratch);
  RETURN_IF_ERROR(stream.launched("inner_values"));
  RETURN_IF_ERROR(rotate(stream, scratch, k, n, false));
  scale_decoded<<<dim3(blocks_of(n, 256), static_cast<unsigned>(k)), 256, 0, stream.handle()>>>(
      scratch, su, sv, static_cast<int>(n), out);
  return stream.launched("scale_decoded");
}

Status measure_on_device(device::Stream& stream, const float* weight, const float* decoded, const double* h, int64_t k,
                         int64_t n, double* scratch, double* rows, double* sums) {
  const device::ScopedDevice scope(stream.device());
  double* const product_of = scratch;
  double* const a = scratch + k * n;
  const int n_rows = static_cast<int>(k), n_cols = static_cast<int>(n);
  CHECK(k % kWideRows == 0 && n % kTileEdge == 0) << "error of [" << k << ", " << n << "]";
  const dim3 tiles(blocks_of(n, kTileEdge), blocks_of(k, kWideRows));
  for (int which = 0; which < 2; ++which) {  // the error, then the weight
    difference<<<blocks_of(k * n, 256), 256, 0, stream.handle()>>>(weight, decoded, k * n, which == 0 ? a : product_of,
                                                                   which == 0 ? product_of : a);
    RETURN_IF_ERROR(stream.launched("difference"));
    row_sums<<<blocks_of(k, 8), 256, 0, stream.handle()>>>(a, a, n_rows, n_cols, rows + (2 + which) * k);
    RETURN_IF_ERROR(stream.launched("row_sums"));
    if (h != nullptr) {
      wide_product<<<tiles, 256, 0, stream.handle()>>>(h, a, product_of, n_cols, n_rows);
      RETURN_IF_ERROR(stream.launched("wide_product"));
    }
    row_sums<<<blocks_of(k, 8), 256, 0, stream.handle()>>>(a, h != nullptr ? product_of : a, n_rows, n_cols,
                                                           rows + which * k);
    RETURN_IF_ERROR(stream.launched("row_sums"));
  }
  total_sums<<<1, 4, 0, stream.handle()>>>(rows, n_rows, sums);
  return stream.launched("total_sums");
}

}  // namespace espalier::codec
