#include "codec/cuda/rows_product.h"

#include <algorithm>

#include "codec/cuda/decode_block.cuh"
#include "ops/cuda/native_tile.cuh"
#include "ops/cuda/shared_memory.cuh"

namespace espalier::codec::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = kGroupColumns;  // of a block of threads
constexpr int kDepth = kBlock;           // rows of k in shared memory at a time
constexpr int kStride = kColumns + 1;    // odd: neither the transposed writes nor the reads meet in a bank
constexpr int kRowGroups = kThreads / kColumns;
constexpr int kAhead = 4 * kDepth / kPairRows;  // blocks
constexpr int kRotationWarps = 4;
static_assert(kColumns == 64 && kDepth % kPairRows == 0 && kDepth / kPairRows <= kThreads / 32);

// tile[kDepth][kStride] := rows k0.. of k and columns column0.. of the matrix; kLoaders threads call it, each with its number.
template <int kLoaders>
__device__ void load_tile(const DeviceWeight& w, int64_t k0, int64_t column0, int thread, float* tile) {
  if (!w.is_exl3) return ops::cuda::load_native_tile<kDepth, kColumns, kStride, kLoaders>(w.native, k0, column0, thread, tile);
  const int warp = thread / 32, lane = thread % 32;
  if (warp >= kDepth / kPairRows) return;
  const int64_t n_pairs = w.in / kPairRows, pair = k0 / kPairRows + warp, index = column0 / kColumns * n_pairs + pair;
  // The blocks of a column group lie one behind the other: the lines that will be needed in four tiles are on their way meanwhile.
  if (pair + kAhead < n_pairs && lane < w.exl3.k2) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(w.exl3.blocks + (index + kAhead) * block_words(w.exl3.k2) + 32 * lane));
  }
  float* corner = tile + warp * kPairRows * kStride;
  decode_block_of_any_width(w.exl3, index, lane,
                            [&](int row, int column, uint16_t bits) { corner[row * kStride + column] = half_bits_to_float(bits); });
}

// Up to kRowGroups rows times kColumns columns: the second half of the threads loads a tile while the first multiplies with the one before.
// x_row(r) and y_row(r) point to rows r < n_rows.
template <typename XRow, typename YRow>
__device__ void multiply_block_of_few_rows(const DeviceWeight& w, int64_t column0, int n_rows, XRow x_row, YRow y_row) {
  constexpr int kLoaders = kThreads / 2;
  constexpr int kBuffer = kDepth * kStride + kRowGroups * kDepth;
  extern __shared__ float buffers[];  // two times a tile and the rows' values
  const int thread = static_cast<int>(threadIdx.x), column = thread % kColumns, row = thread / kColumns;
  const auto load = [&](int64_t k0, float* tile) {
    if (thread < kThreads - kLoaders) return;
    const int loader = thread - (kThreads - kLoaders);
    float* x = tile + kDepth * kStride;
    for (int at = loader; at < n_rows * kDepth; at += kLoaders) {
      const int64_t k = k0 + at % kDepth;
      x[at] = k < w.in ? x_row(at / kDepth)[k] : 0.0f;
    }
    load_tile<kLoaders>(w, k0, column0, loader, tile);
  };
  float sum = 0.0f;
  load(0, buffers);
  __syncthreads();
  for (int64_t k0 = 0, t = 0; k0 < w.in; k0 += kDepth, ++t) {
    if (k0 + kDepth < w.in) load(k0 + kDepth, buffers + (t + 1) % 2 * kBuffer);
    if (row < n_rows) {
      const int depth = static_cast<int>(w.in - k0 < kDepth ? w.in - k0 : kDepth);
      const float* tile = buffers + t % 2 * kBuffer + column;
      const float* x = buffers + t % 2 * kBuffer + kDepth * kStride + row * kDepth;
#pragma unroll 16
      for (int kk = 0; kk < depth; ++kk) sum = fmaf(x[kk], tile[kk * kStride], sum);
    }
    __syncthreads();
  }
  if (row < n_rows && column0 + column < w.out) y_row(row)[column0 + column] = sum;
}
constexpr size_t kFewRowsShared = size_t{2} * (kDepth * kStride + kRowGroups * kDepth) * sizeof(float);

// Up to kRowGroups * kRowsPerThread rows times kColumns columns. x_row(r) and y_row(r) point to rows r < n_rows.
template <int kRowsPerThread, typename XRow, typename YRow>
__device__ void multiply_block_of_rows(const DeviceWeight& w, int64_t column0, int n_rows, XRow x_row, YRow y_row) {
  constexpr int kRows = kRowGroups * kRowsPerThread;
  __shared__ float tile[kDepth * kStride];
  __shared__ float x[kRows * kDepth];
  const int column = static_cast<int>(threadIdx.x) % kColumns, first = static_cast<int>(threadIdx.x) / kColumns * kRowsPerThread;
  float sum[kRowsPerThread] = {};
  for (int64_t k0 = 0; k0 < w.in; k0 += kDepth) {
    const int depth = static_cast<int>(w.in - k0 < kDepth ? w.in - k0 : kDepth);
    load_tile<kThreads>(w, k0, column0, static_cast<int>(threadIdx.x), tile);
    for (int at = static_cast<int>(threadIdx.x); at < n_rows * kDepth; at += kThreads) {
      const int r = at / kDepth, kk = at % kDepth;
      x[at] = kk < depth ? x_row(r)[k0 + kk] : 0.0f;
    }
    __syncthreads();
    if (first < n_rows) {
#pragma unroll 8
      for (int kk = 0; kk < depth; ++kk) {
        const float v = tile[kk * kStride + column];
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) sum[r] = fmaf(x[(first + r) * kDepth + kk], v, sum[r]);
      }
    }
    __syncthreads();
  }
  if (column0 + column >= w.out) return;
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    if (first + r < n_rows) y_row(first + r)[column0 + column] = sum[r];
  }
}

template <int kRowsPerThread, typename XRow, typename YRow>
__device__ __forceinline__ void multiply(const DeviceWeight& w, int64_t column0, int n_rows, XRow x_row, YRow y_row) {
  if constexpr (kRowsPerThread == 1) {
    multiply_block_of_few_rows(w, column0, n_rows, x_row, y_row);
  } else {
    multiply_block_of_rows<kRowsPerThread>(w, column0, n_rows, x_row, y_row);
  }
}

template <int kRowsPerThread>
__global__ __launch_bounds__(kThreads) void rows_product_kernel(RowsProductParams p, const float* x, int64_t x_stride) {
  constexpr int64_t kRows = kRowGroups * kRowsPerThread;
  const int64_t row0 = blockIdx.y * kRows;
  const int n_rows = static_cast<int>(p.n_rows - row0 < kRows ? p.n_rows - row0 : kRows);
  const auto x_row = [&](int r) { return x + (row0 + r) * x_stride; };
  const auto y_row = [&](int r) { return p.y + (row0 + r) * p.y_stride; };
  multiply<kRowsPerThread>(p.weight, int64_t{blockIdx.x} * kColumns, n_rows, x_row, y_row);
}

// A block per piece and kColumns columns; the kernel for few rows is launched when no piece has more than kRowGroups.
template <int kRowsPerThread>
__global__ __launch_bounds__(kThreads) void experts_product_kernel(ExpertsProductParams p, const int32_t* order, const ExpertPiece* pieces,
                                                                   const int32_t* n_pieces) {
  static_assert(kRowsPerThread == 1 || kRowGroups * kRowsPerThread == kPieceRows);
  if (static_cast<int>(blockIdx.y) >= *n_pieces) return;
  const ExpertPiece piece = pieces[blockIdx.y];
  const int32_t* slots = order + piece.first;
  const auto x_row = [&](int r) { return p.rotated + int64_t{slots[r]} * p.in; };
  const auto y_row = [&](int r) { return p.y + int64_t{slots[r]} * p.out; };
  multiply<kRowsPerThread>(p.weights[piece.expert], int64_t{blockIdx.x} * kColumns, piece.n, x_row, y_row);
}

// One warp per 128 values of a row: to := had(x * suh), or a copy for a native weight.
__device__ void rotate_in(const DeviceWeight& w, const float* from, int64_t chunk, int lane, float* to) {
  const int64_t at = chunk * kBlock + 4 * lane;
  if (!w.is_exl3) {
    for (int j = 0; j < 4; ++j) {
      if (at + j < w.in) to[at + j] = from[at + j];
    }
    return;
  }
  float v[4];
  for (int j = 0; j < 4; ++j) v[j] = from[at + j] * half_bits_to_float(w.exl3.suh[at + j]);
  rotate_chunk(v, lane);
  for (int j = 0; j < 4; ++j) to[at + j] = v[j];
}

// y := had(y) * svh, in place; nothing for a native weight.
__device__ void rotate_out(const DeviceWeight& w, int64_t chunk, int lane, float* y) {
  if (!w.is_exl3) return;
  const int64_t at = chunk * kBlock + 4 * lane;
  float v[4];
  for (int j = 0; j < 4; ++j) v[j] = y[at + j];
  rotate_chunk(v, lane);
  for (int j = 0; j < 4; ++j) y[at + j] = v[j] * half_bits_to_float(w.exl3.svh[at + j]);
}

__global__ __launch_bounds__(32 * kRotationWarps) void rotate_rows_in_kernel(RowsProductParams p) {
  const int64_t chunk = int64_t{blockIdx.x} * kRotationWarps + threadIdx.x / 32;
  if (chunk * kBlock >= p.weight.in) return;
  for (int64_t r = blockIdx.y; r < p.n_rows; r += gridDim.y) {
    rotate_in(p.weight, p.x + r * p.x_stride, chunk, static_cast<int>(threadIdx.x % 32), p.rotated + r * p.weight.in);
  }
}

__global__ __launch_bounds__(32 * kRotationWarps) void rotate_rows_out_kernel(RowsProductParams p) {
  const int64_t chunk = int64_t{blockIdx.x} * kRotationWarps + threadIdx.x / 32;
  if (chunk * kBlock >= p.weight.out) return;
  for (int64_t r = blockIdx.y; r < p.n_rows; r += gridDim.y) {
    rotate_out(p.weight, chunk, static_cast<int>(threadIdx.x % 32), p.y + r * p.y_stride);
  }
}

__global__ __launch_bounds__(32 * kRotationWarps) void rotate_slots_in_kernel(ExpertsProductParams p) {
  const int64_t chunk = int64_t{blockIdx.x} * kRotationWarps + threadIdx.x / 32;
  if (chunk * kBlock >= p.in) return;
  for (int64_t s = blockIdx.y; s < p.n_slots; s += gridDim.y) {
    rotate_in(p.weights[p.ids[s]], p.x + s / p.slots_per_row * p.in, chunk, static_cast<int>(threadIdx.x % 32), p.rotated + s * p.in);
  }
}

__global__ __launch_bounds__(32 * kRotationWarps) void rotate_slots_out_kernel(ExpertsProductParams p) {
  const int64_t chunk = int64_t{blockIdx.x} * kRotationWarps + threadIdx.x / 32;
  if (chunk * kBlock >= p.out) return;
  for (int64_t s = blockIdx.y; s < p.n_slots; s += gridDim.y) {
    rotate_out(p.weights[p.ids[s]], chunk, static_cast<int>(threadIdx.x % 32), p.y + s * p.out);
  }
}

dim3 rotation_grid(int64_t width, int64_t n_rows) {
  const int64_t chunks = (width + kBlock - 1) / kBlock;
  return dim3(static_cast<unsigned>((chunks + kRotationWarps - 1) / kRotationWarps), static_cast<unsigned>(std::min<int64_t>(n_rows, 65535)));
}

unsigned column_blocks(int64_t out) { return static_cast<unsigned>((out + kColumns - 1) / kColumns); }

// Few rows: more of them would only make threads idle.
constexpr int64_t kFewRows = kRowGroups;

}  // namespace

DeviceWeight weight_of(const DeviceMatrix& matrix) {
  DeviceWeight w;
  w.is_exl3 = true;
  w.exl3 = matrix;
  w.in = matrix.k;
  w.out = matrix.n;
  return w;
}

DeviceWeight weight_of(const ops::cuda::NativeWeight& native) {
  DeviceWeight w;
  w.native = native;
  w.in = native.in;
  w.out = native.out;
  return w;
}

Status multiply_rows(device::Stream& stream, const RowsProductParams& p) {
  if (p.n_rows == 0 || p.weight.out == 0) return ok_status();
  const int64_t rows_per_block = p.n_rows <= kFewRows ? kRowGroups : kRowGroups * 4;
  const int64_t n_blocks = (p.n_rows + rows_per_block - 1) / rows_per_block;
  if (n_blocks > 65535) return invalid_argument("product: " + std::to_string(p.n_rows) + " rows are too many for one launch");
  const float* x = p.x;
  int64_t x_stride = p.x_stride;
  if (p.weight.is_exl3) {
    rotate_rows_in_kernel<<<rotation_grid(p.weight.in, p.n_rows), 32 * kRotationWarps, 0, stream.handle()>>>(p);
    RETURN_IF_ERROR(stream.launched("rotate_rows_in_kernel"));
    x = p.rotated;
    x_stride = p.weight.in;
  }
  const dim3 grid(column_blocks(p.weight.out), static_cast<unsigned>(n_blocks));
  if (p.n_rows <= kFewRows) {
    RETURN_IF_ERROR(ops::cuda::allow_shared_memory(stream, rows_product_kernel<1>, kFewRowsShared, "product of few rows"));
    rows_product_kernel<1><<<grid, kThreads, kFewRowsShared, stream.handle()>>>(p, x, x_stride);
  } else {
    rows_product_kernel<4><<<grid, kThreads, 0, stream.handle()>>>(p, x, x_stride);
  }
  RETURN_IF_ERROR(stream.launched("rows_product_kernel"));
  if (!p.weight.is_exl3) return ok_status();
  rotate_rows_out_kernel<<<rotation_grid(p.weight.out, p.n_rows), 32 * kRotationWarps, 0, stream.handle()>>>(p);
  return stream.launched("rotate_rows_out_kernel");
}

Status multiply_expert_rows(device::Stream& stream, const ExpertsProductParams& p) {
  if (p.n_slots == 0) return ok_status();
  rotate_slots_in_kernel<<<rotation_grid(p.in, p.n_slots), 32 * kRotationWarps, 0, stream.handle()>>>(p);
  RETURN_IF_ERROR(stream.launched("rotate_slots_in_kernel"));
  const int64_t max_pieces = std::min(p.n_slots, p.plan->n_experts + p.n_slots / kPieceRows);
  const int32_t* order = p.plan->order.data();
  const ExpertPiece* pieces = p.plan->pieces.data();
  const int32_t* n_pieces = p.plan->n_pieces.data();
  if (p.max_per_expert <= kFewRows) {
    RETURN_IF_ERROR(ops::cuda::allow_shared_memory(stream, experts_product_kernel<1>, kFewRowsShared, "product of few rows"));
    experts_product_kernel<1><<<dim3(column_blocks(p.out), static_cast<unsigned>(max_pieces)), kThreads, kFewRowsShared, stream.handle()>>>(p, order, pieces, n_pieces);
  } else {
    experts_product_kernel<4><<<dim3(column_blocks(p.out), static_cast<unsigned>(max_pieces)), kThreads, 0, stream.handle()>>>(p, order, pieces, n_pieces);
  }
  RETURN_IF_ERROR(stream.launched("experts_product_kernel"));
  rotate_slots_out_kernel<<<rotation_grid(p.out, p.n_slots), 32 * kRotationWarps, 0, stream.handle()>>>(p);
  return stream.launched("rotate_slots_out_kernel");
}

}  // namespace espalier::codec::cuda
