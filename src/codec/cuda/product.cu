#include "codec/cuda/product.h"

#include <algorithm>

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
  if (index >= a.rows * a.n_chunks) return;
  const int chunk = index % a.n_chunks, row = index / a.n_chunks;
  const float4 x = __ldg(reinterpret_cast<const float4*>(a.x + row * a.m.k + chunk * kChunk) + lane);
  const ChunkScale scale = quantize_chunk(x, load_scales(a.m.suh + chunk * kChunk, lane), lane, digits + int64_t{index} * kChunkBytes);
  if (lane == 0) scales[index] = scale;
}

// Sums a column block's slices in order, rotates, scales, writes: one warp per row.
__device__ __forceinline__ void finish_columns(const Arguments& a, int column_block, int lane, int warp, int n_warps) {
  const float4 svh = load_scales(a.m.svh + int64_t{column_block} * kChunk, lane);
  for (int row = warp; row < a.rows; row += n_warps) {
    const float* from = a.partials + (int64_t{column_block} * a.rows + row) * a.n_slices * kChunk + 4 * lane;
    float v[4] = {0, 0, 0, 0};
    for (int s0 = 0; s0 < a.n_slices; s0 += 10) {
      float4 part[10];
#pragma unroll
      for (int j = 0; j < 10; ++j) {
        part[j] = s0 + j < a.n_slices ? __ldcg(reinterpret_cast<const float4*>(from + (s0 + j) * kChunk)) : float4{0, 0, 0, 0};
      }
#pragma unroll
      for (int j = 0; j < 10; ++j) v[0] += part[j].x, v[1] += part[j].y, v[2] += part[j].z, v[3] += part[j].w;
    }
    rotate_chunk(v, lane);
    const float4 y = {v[0] * svh.x, v[1] * svh.y, v[2] * svh.z, v[3] * svh.w};
    reinterpret_cast<float4*>(a.y + row * a.m.n + int64_t{column_block} * kChunk)[lane] = y;
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

  // Shared memory: first every warp's digits [warps, rows, 256], later the sums [warps, rows, 64].
  int acc[kSets][kGroupTiles][4];
  float scale[kSets];
  const int column = lane / 4;  // of the B operand: row column/2, main or residual
  if (has_chunk) {
    const uint8_t* digits[kSets];
    const int my_row = lane % 4;
    if constexpr (kRotates) {
      uint8_t* own = reinterpret_cast<uint8_t*>(shared4) + warp * a.rows * kChunkBytes;
      const float4 suh = load_scales(a.m.suh + chunk * kChunk, lane);
      ChunkScale mine[kSets];
      for (int s = 0; s < kSets; ++s) mine[s] = {0, 0, 0, 0};
#pragma unroll
      for (int r = 0; r < kSetRows * kSets; ++r) {
        if (r < a.rows) {
          const float4 x = __ldg(reinterpret_cast<const float4*>(a.x + r * a.m.k + chunk * kChunk) + lane);
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
      wait_for_previous_kernel();
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
  } else {
    wait_for_previous_kernel();
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
  __syncthreads();
  const int n_used = min(n_warps, a.n_chunks - slice * n_warps);
  float* partials = a.partials + int64_t{group / 2} * a.rows * a.n_slices * kChunk + slice * kChunk + group % 2 * kGroupColumns;
  for (int i = threadIdx.x; i < a.rows * kGroupColumns; i += blockDim.x) {
    float sum = 0;
    for (int w0 = 0; w0 < n_used; ++w0) sum += sums[w0 * a.rows * kGroupColumns + i];
    __stcg(partials + int64_t{i / kGroupColumns} * a.n_slices * kChunk + i % kGroupColumns, sum);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    const uint32_t before = atomicAdd(a.arrivals + group / 2, 1u);
    is_last = before == 2u * a.n_slices - 1u;
    if (is_last) a.arrivals[group / 2] = 0;  // nobody else comes
    __threadfence();
  }
  __syncthreads();
  if (is_last) finish_columns(a, group / 2, lane, warp, n_warps);
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
  s.max_k = max_k;
  s.max_n = max_n;
  ASSIGN_OR_RETURN(s.partials, device::DeviceArray<float>::allocate(device, blocks * kMaxProductRows * slices * kChunk, "product partials"));
  ASSIGN_OR_RETURN(s.arrivals, device::DeviceArray<uint32_t>::allocate(device, blocks, "product arrivals"));
  ASSIGN_OR_RETURN(s.digits, device::DeviceArray<uint8_t>::allocate(device, kMaxProductRows * chunks * kChunkBytes, "product digits"));
  ASSIGN_OR_RETURN(s.scales, device::DeviceArray<ChunkScale>::allocate(device, kMaxProductRows * chunks, "product scales"));
  RETURN_IF_ERROR(stream.fill_bytes(s.arrivals.data(), 0, blocks * sizeof(uint32_t)));
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
    if (!rotates) {
      const int n_warps = a.rows * a.n_chunks;
      rotate_rows_kernel<<<static_cast<unsigned>((n_warps + 3) / 4), 128, 0, stream.handle()>>>(a, scratch.digits.data(), scratch.scales.data());
      RETURN_IF_ERROR(stream.launched("rotate_rows_kernel"));
    }
    cudaLaunchAttribute dependent = {};
    dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    dependent.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(m.n / kGroupColumns * a.n_slices));
    config.blockDim = dim3(static_cast<unsigned>(32 * warps));
    config.dynamicSmemBytes = static_cast<size_t>(warps * a.rows * kChunkBytes);  // digits and sums take the same
    config.stream = stream.handle();
    config.attrs = &dependent;
    config.numAttrs = rotates ? 0 : 1;
    launch(config, a, rotates);
    RETURN_IF_ERROR(stream.launched("product_kernel"));
  }
  return ok_status();
}

}  // namespace espalier::codec::cuda
