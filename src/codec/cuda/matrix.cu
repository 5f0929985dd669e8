#include "codec/cuda/matrix.h"

#include <algorithm>
#include <cuda_bf16.h>

#include "codec/cuda/decode_block.cuh"
#include "device/cuda_status.cuh"

namespace espalier::codec::cuda {
namespace {

constexpr int kDecodeThreads = 256;

// One thread per word; `tiles` in file order.
__global__ void device_layout_kernel(const uint32_t* __restrict__ tiles, int64_t n_pairs, int64_t n_tiles, int k2, int64_t n_words,
                                     uint32_t* __restrict__ blocks) {
  for (int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; at < n_words; at += int64_t{gridDim.x} * blockDim.x) {
    const int64_t block = at / (32 * k2);
    const int lane = static_cast<int>(at % (32 * k2)) / k2, w = static_cast<int>(at % k2);
    const int64_t group = block / n_pairs, pair = block % n_pairs;
    const uint32_t word = layout_word(k2, lane, w, [&](int h, int nt) {
      return tiles + ((2 * pair + h) * n_tiles + kGroupTiles * group + nt) * 4 * k2;
    });
    blocks[block * 32 * k2 + word_place(k2, lane, w)] = word;
  }
}

// A warp decodes 32 rows x 64 columns through shared memory, so that it writes whole 128-byte lines.
__global__ __launch_bounds__(kDecodeThreads) void decode_inner_kernel(DeviceMatrix m, uint16_t* __restrict__ out) {
  constexpr int kStride = kGroupColumns + 8;  // keeps 16-byte alignment, spreads the rows over the banks
  __shared__ __align__(16) uint16_t shared[kDecodeThreads / 32][kPairRows * kStride];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t n_pairs = m.k / kPairRows, index = int64_t{blockIdx.x} * (kDecodeThreads / 32) + warp;
  if (index >= n_pairs * (m.n / kGroupColumns)) return;
  uint16_t* tile = shared[warp];
  decode_block_of_any_width(m, index, lane, [&](int row, int column, uint16_t bits) { tile[row * kStride + column] = bits; });
  __syncwarp();
  const int64_t row0 = index % n_pairs * kPairRows, column0 = index / n_pairs * kGroupColumns;
  for (int i = lane; i < kPairRows * 8; i += 32) {
    const int row = i / 8, part = i % 8;
    *reinterpret_cast<uint4*>(out + (row0 + row) * m.n + column0 + 8 * part) = *reinterpret_cast<const uint4*>(tile + row * kStride + 8 * part);
  }
}

constexpr int kTileStride = kBlock + 1;  // odd: a warp reads rows and columns without bank conflicts
constexpr int kWeightShared = kBlock * kTileStride * static_cast<int>(sizeof(float));

__device__ __forceinline__ void put_narrowed(void* out, int64_t at, WeightType type, float v) {
  if (type == WeightType::kF32) static_cast<float*>(out)[at] = v;
  if (type == WeightType::kF16) static_cast<__half*>(out)[at] = __float2half_rn(v);
  if (type == WeightType::kBF16) static_cast<__nv_bfloat16*>(out)[at] = __float2bfloat16_rn(v);
}

// The 128-point rotation with element l + 32 j in register j of lane l.
__device__ __forceinline__ void rotate_strided(float (&v)[4], int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float sign = (lane & distance) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = __fmaf_rn(v[j], sign, __shfl_xor_sync(0xFFFFFFFFu, v[j], distance));
  }
  const float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
  v[0] = (a + c) * kHadamardScale, v[1] = (b + d) * kHadamardScale, v[2] = (a - c) * kHadamardScale, v[3] = (b - d) * kHadamardScale;
}

// A block of threads per 128 x 128: eight warps decode eight blocks into shared memory and rotate it both ways.
__global__ __launch_bounds__(kDecodeThreads) void decode_weight_kernel(DeviceMatrix m, WeightType type, void* __restrict__ out) {
  extern __shared__ float tile[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t n_pairs = m.k / kPairRows, row_block = blockIdx.x % (m.k / kBlock), column_block = blockIdx.x / (m.k / kBlock);
  const int pair = warp % kChunkPairs, group = warp / kChunkPairs;
  float* corner = tile + pair * kPairRows * kTileStride + group * kGroupColumns;
  decode_block_of_any_width(m, (2 * column_block + group) * n_pairs + row_block * kChunkPairs + pair, lane,
                            [&](int row, int column, uint16_t bits) { corner[row * kTileStride + column] = half_bits_to_float(bits); });
  __syncthreads();
  for (int c = warp; c < kBlock; c += kDecodeThreads / 32) {
    float v[4];
    for (int j = 0; j < 4; ++j) v[j] = tile[(lane + 32 * j) * kTileStride + c];
    rotate_strided(v, lane);
    for (int j = 0; j < 4; ++j) tile[(lane + 32 * j) * kTileStride + c] = v[j] * half_bits_to_float(m.suh[row_block * kBlock + lane + 32 * j]);
  }
  __syncthreads();
  for (int r = warp; r < kBlock; r += kDecodeThreads / 32) {
    float v[4];
    for (int j = 0; j < 4; ++j) v[j] = tile[r * kTileStride + lane + 32 * j];
    rotate_strided(v, lane);
    for (int j = 0; j < 4; ++j) {
      const int64_t column = column_block * kBlock + lane + 32 * j;
      put_narrowed(out, (row_block * kBlock + r) * m.n + column, type, v[j] * half_bits_to_float(m.svh[column]));
    }
  }
}

}  // namespace

Status to_device_layout(device::Stream& stream, const TrellisView& words, uint32_t* blocks) {
  const int64_t n_words = layout_words(words.k, words.n, words.k2);
  const int64_t n_blocks = std::min<int64_t>((n_words + 255) / 256, 1 << 16);
  device_layout_kernel<<<static_cast<unsigned>(n_blocks), 256, 0, stream.handle()>>>(
      reinterpret_cast<const uint32_t*>(words.words), words.k / kPairRows, words.n / kTile, words.k2, n_words, blocks);
  return stream.launched("device_layout_kernel");
}

Result<Matrix> Matrix::upload(device::Stream& stream, const Exl3View& tensor) {
  const TrellisView& t = tensor.trellis;
  Matrix m;
  const size_t n_words = static_cast<size_t>(trellis_words(t.k, t.n, t.k2));
  ASSIGN_OR_RETURN(const auto file_order, device::DeviceArray<uint16_t>::upload(stream, {t.words, n_words}, "trellis in file order"));
  ASSIGN_OR_RETURN(m.blocks_, device::DeviceArray<uint32_t>::allocate(stream.device(), n_words / 2, "trellis"));
  ASSIGN_OR_RETURN(m.suh_, device::DeviceArray<uint16_t>::upload(stream, {tensor.suh, static_cast<size_t>(t.k)}, "suh"));
  ASSIGN_OR_RETURN(m.svh_, device::DeviceArray<uint16_t>::upload(stream, {tensor.svh, static_cast<size_t>(t.n)}, "svh"));
  RETURN_IF_ERROR(to_device_layout(stream, {file_order.data(), t.k, t.n, t.k2, t.codebook}, m.blocks_.data()));
  RETURN_IF_ERROR(stream.synchronize());
  m.view_ = {m.blocks_.data(), m.suh_.data(), m.svh_.data(), t.k, t.n, t.k2, t.codebook};
  return Result<Matrix>(std::move(m));
}

Status decode_inner_f16(device::Stream& stream, const DeviceMatrix& m, uint16_t* out) {
  const int64_t n_warps = m.k / kPairRows * (m.n / kGroupColumns), per_block = kDecodeThreads / 32;
  decode_inner_kernel<<<static_cast<unsigned>((n_warps + per_block - 1) / per_block), kDecodeThreads, 0, stream.handle()>>>(m, out);
  return stream.launched("decode_inner_kernel");
}

Status decode_weight(device::Stream& stream, const DeviceMatrix& m, WeightType type, void* out) {
  ESPALIER_CUDA_TRY("decode_weight", cudaFuncSetAttribute(decode_weight_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kWeightShared));
  const int64_t n_blocks = m.k / kBlock * (m.n / kBlock);
  decode_weight_kernel<<<static_cast<unsigned>(n_blocks), kDecodeThreads, kWeightShared, stream.handle()>>>(m, type, out);
  return stream.launched("decode_weight_kernel");
}

}  // namespace espalier::codec::cuda
