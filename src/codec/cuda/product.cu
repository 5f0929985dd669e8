#include "codec/cuda/product.h"

#include <algorithm>

#include "codec/cuda/arrivals.cuh"
#include "codec/cuda/lanes.cuh"
#include "device/cuda_status.cuh"
#include "device/device.h"

namespace espalier::codec::cuda {
namespace {

struct Arguments {
  DeviceMatrix m;
  const float* x;             // [rows, k]
  const uint8_t* digits;      // [rows, k/128, 256], two launches only
  const ChunkScale* scales;   // [rows, k/128]
  float* y;                   // [rows, n]
  float* partials;            // [n/128, rows, n_slices, 128]
  uint32_t* arrivals;         // [n/128]
  int rows, n_chunks, n_slices;
};

// Rotates and quantizes one chunk of one row. Both plans go through here, so both give the same bits.
__device__ __forceinline__ ChunkScale quantize_chunk(const float4& x, const float4& suh, int lane, uint8_t* to) {
  float v[4] = {x.x * suh.x, x.y * suh.y, x.z * suh.z, x.w * suh.w};
  rotate_chunk(v, lane);
  const float largest = chunk_max(v);
  const Digits digits = digits_of(v, largest > 0 ? 127.0f / largest : 0.0f);
  store_digits(digits, lane, to);
  ChunkScale out;
  out.scale = largest * (kSlope / (127.0f * kResidualUnits));
  out.start_main = -kWholeOffset * digits.sum_main;
  const float rest = (kResidualUnits * kRestOffset) * static_cast<float>(digits.sum_main);
  out.start_residual = -(static_cast<int>(rintf(rest + kRestOffset * static_cast<float>(digits.sum_residual))) + kWholeOffset * digits.sum_residual);
  out.unused = 0;
  return out;
}

__global__ __launch_bounds__(128) void rotate_rows_kernel(Arguments a, uint8_t* digits, ChunkScale* scales) {
  const int lane = threadIdx.x % 32, index = blockIdx.x * 4 + threadIdx.x / 32;
  let_next_kernel_start();
  wait_for_previous_kernel();
  if (index >= a.rows * a.n_chunks) return;
  const int chunk = index % a.n_chunks, row = index / a.n_chunks;
  const float4 x = *(reinterpret_cast<const float4*>(a.x + row * a.m.k + chunk * kChunk) + lane);
  const ChunkScale scale = quantize_chunk(x, load_scales(a.m.suh + chunk * kChunk, lane), lane, digits + int64_t{index} * kChunkBytes);
  if (lane == 0) scales[index] = scale;
}

constexpr int kFinishSlices = 10;  // loads in flight of a lane, times rows

// Sums a column block's slices in order, rotates, scales, writes; a warp has up to kFinishRows rows at a time. own: this block's sums
// [rows, 64] of slice own_slice and half own_half, which never left it. Everyone who has not written yet is running, so the wait ends.
template <int kFinishRows>
__device__ __forceinline__ void finish_columns(const Arguments& a, int column_block, const float* own, int own_slice, int own_half, int lane,
                                               int warp, int n_warps) {
  const float4 svh = load_scales(a.m.svh + int64_t{column_block} * kChunk, lane);
  const bool is_mine = lane / 16 == own_half;
  for (int row0 = warp; row0 < a.rows; row0 += kFinishRows * n_warps) {
    float* from = a.partials + (int64_t{column_block} * a.rows + row0) * a.n_slices * kChunk + 4 * lane;
    const int64_t row_step = int64_t{n_warps} * a.n_slices * kChunk;
    float v[kFinishRows][4] = {};
    for (int s0 = 0; s0 < a.n_slices; s0 += kFinishSlices) {
      uint4 part[kFinishRows][kFinishSlices];
      bool all_there;
      do {
        all_there = true;
#pragma unroll
        for (int r = 0; r < kFinishRows; ++r) {
#pragma unroll
          for (int j = 0; j < kFinishSlices; ++j) {
            const int slice = s0 + j, row = row0 + r * n_warps;
            part[r][j] = uint4{0, 0, 0, 0};
            if (slice < a.n_slices && row < a.rows) {
              if (is_mine && slice == own_slice) {
                part[r][j] = *reinterpret_cast<const uint4*>(own + row * kGroupColumns + 4 * (lane % 16));
              } else {
                part[r][j] = load_relaxed(from + r * row_step + slice * kChunk);
              }
            }
          }
        }
#pragma unroll
        for (int r = 0; r < kFinishRows; ++r) {
#pragma unroll
          for (int j = 0; j < kFinishSlices; ++j) all_there = all_there && has_none(part[r][j], kEmptyFloat);
        }
      } while (!__all_sync(0xFFFFFFFFu, all_there));
#pragma unroll
      for (int r = 0; r < kFinishRows; ++r) {
#pragma unroll
        for (int j = 0; j < kFinishSlices; ++j) {
          v[r][0] += __uint_as_float(part[r][j].x), v[r][1] += __uint_as_float(part[r][j].y);
          v[r][2] += __uint_as_float(part[r][j].z), v[r][3] += __uint_as_float(part[r][j].w);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kFinishRows; ++r) {
      const int row = row0 + r * n_warps;
      if (row >= a.rows) break;
      rotate_chunk(v[r], lane);
      const float4 y = {v[r][0] * svh.x, v[r][1] * svh.y, v[r][2] * svh.z, v[r][3] * svh.w};
      reinterpret_cast<float4*>(a.y + row * a.m.n + int64_t{column_block} * kChunk)[lane] = y;
      for (int slice = 0; slice < a.n_slices; ++slice) {
        store_relaxed(from + r * row_step + slice * kChunk, filled(kEmptyFloat));
      }
    }
  }
}

// A block of threads: 64 columns, one chunk of k per warp. All weights of the block are requested before anything else is done.
template <int k2, int kSets, bool kRotates>
__global__ __launch_bounds__(192) void product_kernel(Arguments a) {
  extern __shared__ float4 shared4[];
  __shared__ bool is_last;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
  const int slice = blockIdx.x % a.n_slices, group = blockIdx.x / a.n_slices;
  const int chunk = slice * n_warps + warp;
  const bool has_chunk = chunk < a.n_chunks;
  let_next_kernel_start();

  uint32_t w[kChunkPairs][k2];
  if (has_chunk) {
    const uint32_t* blocks = a.m.blocks + (int64_t{group} * a.n_chunks + chunk) * kChunkPairs * block_words(k2);
#pragma unroll
    for (int p = 0; p < kChunkPairs; ++p) load_block<k2>(blocks + p * block_words(k2), lane, w[p]);
  }

  float4 suh = {};
  if (kRotates && has_chunk) suh = load_scales(a.m.suh + chunk * kChunk, lane);
  wait_for_previous_kernel();  // weights and scales do not depend on it, everything below does
  // The last block to begin at 128 columns will finish them: all others are running then, so it can wait for their sums.
  uint32_t ticket = 0;
  if (threadIdx.x == 0) ticket = atomicAdd(a.arrivals + group / 2, 1u);

  // Shared memory: first every warp's digits [warps, rows, 256], later the sums [warps, rows, 64].
  int acc[kSets][kGroupTiles][4];
  float scale[kSets];
  const int column = lane / 4;  // of the B operand: row column/2, main or residual
  if (has_chunk) {
    const uint8_t* digits[kSets];
    const int my_row = lane % 4;
    if constexpr (kRotates) {
      uint8_t* own = reinterpret_cast<uint8_t*>(shared4) + warp * a.rows * kChunkBytes;
      ChunkScale mine[kSets];
      for (int s = 0; s < kSets; ++s) mine[s] = {0, 0, 0, 0};
#pragma unroll
      for (int r = 0; r < kSetRows * kSets; ++r) {
        if (r < a.rows) {
          const float4 x = *(reinterpret_cast<const float4*>(a.x + r * a.m.k + chunk * kChunk) + lane);
          const ChunkScale of_row = quantize_chunk(x, suh, lane, own + r * kChunkBytes);
          if (my_row == r % kSetRows) mine[r / kSetRows] = of_row;
        }
      }
      __syncwarp();
#pragma unroll
      for (int s = 0; s < kSets; ++s) {
        digits[s] = own + min(kSetRows * s + column / 2, a.rows - 1) * kChunkBytes;
        scale[s] = mine[s].scale;
#pragma unroll
        for (int nt = 0; nt < kGroupTiles; ++nt) {
          acc[s][nt][0] = acc[s][nt][2] = mine[s].start_main;
          acc[s][nt][1] = acc[s][nt][3] = mine[s].start_residual;
        }
      }
    } else {
#pragma unroll
      for (int s = 0; s < kSets; ++s) {
        digits[s] = a.digits + (int64_t{min(kSetRows * s + column / 2, a.rows - 1)} * a.n_chunks + chunk) * kChunkBytes;
        const int4 raw = __ldcg(reinterpret_cast<const int4*>(a.scales + min(kSetRows * s + my_row, a.rows - 1) * a.n_chunks + chunk));
        scale[s] = __int_as_float(raw.x);
#pragma unroll
        for (int nt = 0; nt < kGroupTiles; ++nt) {
          acc[s][nt][0] = acc[s][nt][2] = raw.y;
          acc[s][nt][1] = acc[s][nt][3] = raw.z;
        }
      }
    }
    const int offset = (column % 2) * 32 + 8 * (lane % 4);
    uint2 b[kChunkPairs][kSets];
#pragma unroll
    for (int p = 0; p < kChunkPairs; ++p) {
#pragma unroll
      for (int s = 0; s < kSets; ++s) {
        const uint2* at = reinterpret_cast<const uint2*>(digits[s] + p * kPairBytes + offset);
        b[p][s] = kRotates ? *at : __ldcg(at);
      }
    }
#pragma unroll
    for (int p = 0; p < kChunkPairs; ++p) multiply_block<k2, kSets>(w[p], b[p], ring_neighbour(lane), acc);
  }

  float* sums = reinterpret_cast<float*>(shared4);
  if constexpr (kRotates) __syncthreads();  // the digits of all warps have been read
  if (has_chunk) {
#pragma unroll
    for (int s = 0; s < kSets; ++s) {
      const int row = kSetRows * s + lane % 4;
      if (row < a.rows) {
        float* to = sums + (warp * a.rows + row) * kGroupColumns + lane / 4;
#pragma unroll
        for (int nt = 0; nt < kGroupTiles; ++nt) {
          to[16 * nt] = static_cast<float>(kResidualUnits * acc[s][nt][0] + acc[s][nt][1]) * scale[s];
          to[16 * nt + 8] = static_cast<float>(kResidualUnits * acc[s][nt][2] + acc[s][nt][3]) * scale[s];
        }
      }
    }
  }
  if (threadIdx.x == 0) {
    is_last = ticket == 2u * a.n_slices - 1u;
    if (is_last) a.arrivals[group / 2] = 0;  // nobody else comes
  }
  __syncthreads();
  const int n_used = min(n_warps, a.n_chunks - slice * n_warps);
  float* partials = a.partials + int64_t{group / 2} * a.rows * a.n_slices * kChunk + slice * kChunk + group % 2 * kGroupColumns;
  for (int i = 4 * threadIdx.x; i < a.rows * kGroupColumns; i += 4 * blockDim.x) {
    float4 sum = {0, 0, 0, 0};
    for (int w0 = 0; w0 < n_used; ++w0) {
      const float4 v = *reinterpret_cast<const float4*>(sums + w0 * a.rows * kGroupColumns + i);
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    if (is_last) {
      *reinterpret_cast<float4*>(sums + i) = sum;
    } else {
      const uint4 bits = {__float_as_uint(sum.x), __float_as_uint(sum.y), __float_as_uint(sum.z), __float_as_uint(sum.w)};
      store_relaxed(partials + int64_t{i / kGroupColumns} * a.n_slices * kChunk + i % kGroupColumns, bits);
    }
  }
  if (!is_last) return;
  __syncthreads();
  finish_columns<kSets == 1 ? 1 : 2>(a, group / 2, sums, slice, group % 2, lane, warp, n_warps);
}

// One chunk per warp; blocks of 4 to 6 warps so that the slices of k come out even. Depends on k only: it decides the order of sums.
int warps_for(int n_chunks) {
  int best = 4, waste = 1 << 30;
  for (int warps : {4, 6, 5, 3}) {
    const int unused = (n_chunks + warps - 1) / warps * warps - n_chunks;
    if (unused < waste) best = warps, waste = unused;
  }
  return best;
}

template <int k2, int kSets>
void launch_width(const cudaLaunchConfig_t& config, const Arguments& a, bool rotates) {
  if (rotates) {
    cudaLaunchKernelEx(&config, product_kernel<k2, kSets, true>, a);
  } else {
    cudaLaunchKernelEx(&config, product_kernel<k2, kSets, false>, a);
  }
}

// Widths that experts use are built for 4, 8 and 16 rows; the others for 8 only, to keep the program small.
template <int k2>
void launch_sets(const cudaLaunchConfig_t& config, const Arguments& a, bool rotates) {
  if (a.rows <= 4) return launch_width<k2, 1>(config, a, rotates);
  if (a.rows <= 8) return launch_width<k2, 2>(config, a, rotates);
  return launch_width<k2, 4>(config, a, rotates);
}

bool is_common_width(int k2) { return k2 == 4 || k2 == 6 || k2 == 8 || k2 == 10; }

void launch(const cudaLaunchConfig_t& config, const Arguments& a, bool rotates) {
  switch (a.m.k2) {
    case 2: return launch_width<2, 2>(config, a, rotates);
    case 3: return launch_width<3, 2>(config, a, rotates);
    case 4: return launch_sets<4>(config, a, rotates);
    case 5: return launch_width<5, 2>(config, a, rotates);
    case 6: return launch_sets<6>(config, a, rotates);
    case 7: return launch_width<7, 2>(config, a, rotates);
    case 8: return launch_sets<8>(config, a, rotates);
    case 10: return launch_sets<10>(config, a, rotates);
    case 12: return launch_width<12, 2>(config, a, rotates);
    case 14: return launch_width<14, 2>(config, a, rotates);
    case 16: return launch_width<16, 2>(config, a, rotates);
  }
}

constexpr int64_t kMinSlices = 3;  // warps a block at least: bounds the number of slices

}  // namespace

Result<ProductScratch> ProductScratch::create(device::Stream& stream, int64_t max_k, int64_t max_n) {
  const int device = stream.device();
  const size_t chunks = static_cast<size_t>(max_k / kChunk), blocks = static_cast<size_t>(max_n / kChunk);
  const size_t slices = (chunks + kMinSlices - 1) / kMinSlices;
  ProductScratch s;
  ASSIGN_OR_RETURN(const device::DeviceInfo info, device::find_device(device));
  s.has_dependent_launch = info.major >= 9;
  s.max_k = max_k;
  s.max_n = max_n;
  ASSIGN_OR_RETURN(s.partials, device::DeviceArray<float>::allocate(device, blocks * kMaxProductRows * slices * kChunk, "product partials"));
  ASSIGN_OR_RETURN(s.arrivals, device::DeviceArray<uint32_t>::allocate(device, blocks, "product arrivals"));
  ASSIGN_OR_RETURN(s.digits, device::DeviceArray<uint8_t>::allocate(device, kMaxProductRows * chunks * kChunkBytes, "product digits"));
  ASSIGN_OR_RETURN(s.scales, device::DeviceArray<ChunkScale>::allocate(device, kMaxProductRows * chunks, "product scales"));
  RETURN_IF_ERROR(stream.fill_bytes(s.arrivals.data(), 0, blocks * sizeof(uint32_t)));
  RETURN_IF_ERROR(stream.fill_bytes(s.partials.data(), kEmptyFloatByte, s.partials.size() * sizeof(float)));
  return Result<ProductScratch>(std::move(s));
}

Status multiply(device::Stream& stream, const DeviceMatrix& m, const float* x, int64_t rows, float* y, ProductScratch& scratch,
                ProductPlan plan) {
  if (m.codebook != Codebook::kMul1) {
    return unimplemented("product on the GPU with codebook " + std::string(codebook_name(m.codebook)) + "; decode the matrix, or use mul1");
  }
  if (rows < 1 || rows > kMaxProductRows || m.k > scratch.max_k || m.n > scratch.max_n) {
    return invalid_argument("product of " + std::to_string(rows) + " rows with [" + std::to_string(m.k) + ", " + std::to_string(m.n) +
                            "]: expected 1 to " + std::to_string(kMaxProductRows) + " rows and at most [" + std::to_string(scratch.max_k) +
                            ", " + std::to_string(scratch.max_n) + "] as the scratch was made");
  }
  const int max_rows = is_common_width(m.k2) ? kMaxProductRows : 8;
  for (int64_t first = 0; first < rows; first += max_rows) {
    Arguments a = {};
    a.m = m;
    a.x = x + first * m.k;
    a.y = y + first * m.n;
    a.digits = scratch.digits.data();
    a.scales = scratch.scales.data();
    a.partials = scratch.partials.data();
    a.arrivals = scratch.arrivals.data();
    a.rows = static_cast<int>(std::min<int64_t>(max_rows, rows - first));
    a.n_chunks = static_cast<int>(m.k / kChunk);
    const int warps = warps_for(a.n_chunks);
    a.n_slices = (a.n_chunks + warps - 1) / warps;
    const bool rotates = plan == ProductPlan::kOneLaunch || (plan == ProductPlan::kAuto && a.rows <= 2);
    // Each launch may begin before the one before it has ended: it asks for weights, then waits.
    cudaLaunchAttribute dependent = {};
    dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    dependent.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.stream = stream.handle();
    config.attrs = &dependent;
    config.numAttrs = scratch.has_dependent_launch ? 1 : 0;
    if (!rotates) {
      config.gridDim = dim3(static_cast<unsigned>((a.rows * a.n_chunks + 3) / 4));
      config.blockDim = dim3(128);
      cudaLaunchKernelEx(&config, rotate_rows_kernel, a, scratch.digits.data(), scratch.scales.data());
      RETURN_IF_ERROR(stream.launched("rotate_rows_kernel"));
    }
    config.gridDim = dim3(static_cast<unsigned>(m.n / kGroupColumns * a.n_slices));
    config.blockDim = dim3(static_cast<unsigned>(32 * warps));
    config.dynamicSmemBytes = static_cast<size_t>(warps * a.rows * kChunkBytes);  // digits and sums take the same
    launch(config, a, rotates);
    RETURN_IF_ERROR(stream.launched("product_kernel"));
  }
  return ok_status();
}

}  // namespace espalier::codec::cuda
