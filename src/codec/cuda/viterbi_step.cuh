// One step of the search for kTiles tiles at once, by a whole block. Internal to the GPU search.
//
// Per state: unpack its code (shared by the tiles), subtract the target, fma, half a three-way minimum. Everything else
// is per node.
#pragma once

#include <climits>
#include <type_traits>

#include "codec/cuda/viterbi_costs.cuh"
#include "codec/cuda/viterbi_shape.cuh"

namespace espalier::codec::cuda {

// All shared memory of a block, so that accesses are known to go there.
extern __shared__ __align__(16) unsigned char search_shared[];

// A cost vector of one tile.
template <class S>
struct CostArray {
  using Element = std::conditional_t<S::kNarrow, uint16_t, int>;
  using Costs = CostFloat<S::kRule>;
  unsigned char* base;  // of device memory; ignored in shared memory
  int offset;           // bytes, from `base` or search_shared

  __device__ Element* data() const {
    return reinterpret_cast<Element*>((S::kInShared ? search_shared : base) + offset);
  }
  __device__ CostArray moved(int bytes) const { return {base, offset + bytes}; }
  __device__ int get(int node) const {
    const Element c = data()[S::place(node)];
    return S::kNarrow ? Costs::encode(c) : static_cast<int>(c);
  }
  __device__ void set(int node, int bits) const {
    data()[S::place(node)] = static_cast<Element>(S::kNarrow ? Costs::decode(bits) : bits);
  }
  // n neighbours from `node`, a multiple of n, on, moved by `offset`, a multiple of kInStride.
  template <int n>
  __device__ void get_many(int node, int offset, float* out) const {
    if constexpr (S::kNarrow && n >= 4) {
#pragma unroll
      for (int i = 0; i < n; i += 4) {
        const uint2 w = *reinterpret_cast<const uint2*>(data() + S::place(node + i) + offset);
        const uint32_t word[2] = {w.x, w.y};
#pragma unroll
        for (int h = 0; h < 4; ++h) {
          const uint32_t v = word[h / 2];
          const uint32_t field = h % 2 == 0 ? v << 6 : v >> 10;
          out[i + h] = __int_as_float(static_cast<int>((field & 0x3FFFC0u) | static_cast<uint32_t>(Costs::kBase | 32)));
        }
      }
    } else if constexpr (!S::kNarrow && n >= 4) {
#pragma unroll
      for (int i = 0; i < n; i += 4) {
        const float4 v = *reinterpret_cast<const float4*>(data() + S::place(node + i) + offset);
        out[i] = v.x, out[i + 1] = v.y, out[i + 2] = v.z, out[i + 3] = v.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const Element c = data()[S::place(node + i) + offset];
        out[i] = __int_as_float(S::kNarrow ? Costs::encode(c) : static_cast<int>(c));
      }
    }
  }
  // n finished neighbours; also to `row` (by node, 16 bits) when it is not null.
  template <int n>
  __device__ void set_many(int node, const int* bits, uint16_t* row) const {
    uint32_t packed[(n + 1) / 2];
    if (S::kNarrow || row != nullptr) {
#pragma unroll
      for (int i = 0; i < n; i += 2) {
        packed[i / 2] = static_cast<uint32_t>(Costs::decode(bits[i]));
        if (i + 1 < n) packed[i / 2] |= static_cast<uint32_t>(Costs::decode(bits[i + 1])) << 16;
      }
    }
    if constexpr (S::kNarrow) {
      copy<n, false>(packed, data(), node);
    } else if constexpr (n >= 4) {
#pragma unroll
      for (int i = 0; i < n; i += 4) {
        *reinterpret_cast<int4*>(data() + S::place(node + i)) =
            make_int4(bits[i], bits[i + 1], bits[i + 2], bits[i + 3]);
      }
    } else if constexpr (n == 2) {
      *reinterpret_cast<int2*>(data() + S::place(node)) = make_int2(bits[0], bits[1]);
    } else {
      data()[S::place(node)] = bits[0];
    }
    if (row != nullptr) copy<n, true>(packed, row, node);
  }

 private:
  // n 16-bit numbers, in runs of 8 that `place` keeps together.
  template <int n, bool kByNode>
  static __device__ void copy(const uint32_t* packed, uint16_t* to, int node) {
    constexpr int kRun = n < 8 ? n : 8;
#pragma unroll
    for (int i = 0; i < n; i += kRun) {
      uint16_t* p = to + (kByNode ? node + i : S::place(node + i));
      if constexpr (kRun == 8) {
        *reinterpret_cast<uint4*>(p) =
            make_uint4(packed[i / 2], packed[i / 2 + 1], packed[i / 2 + 2], packed[i / 2 + 3]);
      } else if constexpr (kRun == 4) {
        *reinterpret_cast<uint2*>(p) = make_uint2(packed[i / 2], packed[i / 2 + 1]);
      } else if constexpr (kRun == 2) {
        *reinterpret_cast<uint32_t*>(p) = packed[0];
      } else {
        *p = static_cast<uint16_t>(packed[0]);
      }
    }
  }
};

__device__ __forceinline__ void opaque(uint32_t& word) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+r"(word));
#endif
}

// What a step needs of its tiles. Tile t's cost arrays are S::kTileBytes * t behind these, its rows S::kRowsOfTile.
template <class S>
struct StepTiles {
  CostArray<S> before_first, behind_first;
  uint16_t* row_first;  // where the new costs are also kept, or null
  float target[S::kTiles];

  __device__ CostArray<S> before(int t) const { return before_first.moved(t * S::kTileBytes); }
  __device__ CostArray<S> behind(int t) const { return behind_first.moved(t * S::kTileBytes); }
  __device__ uint16_t* row(int t) const { return row_first == nullptr ? nullptr : row_first + t * S::kRowsOfTile; }
};

// Computes the out-nodes of a middle again by the definition in viterbi_cost.h, for the rare case that the fast
// arithmetic may differ from it: those with a cost above `fine`. A real call, so that the registers it needs are not
// taken from the fast path.
template <class S, int kParity>
__device__ __noinline__ void repair_nodes(const int16_t* codes, CostArray<S> before, CostArray<S> behind, uint16_t* row,
                                          int middle, int16_t w, int fine) {
  using Costs = CostFloat<S::kRule>;
  constexpr int in_bits = S::kInBits(kParity);
  constexpr int out_bits = S::kOutBits(kParity);
#pragma unroll 1
  for (int o = 0; o < S::kOutParts(kParity) * S::kY; ++o) {
    const int node = S::out_node(kParity, o / S::kY, middle) + o % S::kY;
    if (Costs::decode(behind.get(node)) <= fine) continue;
    int least = kMostCost;
#pragma unroll 8
    for (int q = 0; q < (1 << out_bits); ++q) {
      const int state = (q << (16 - out_bits)) | node;
      least =
          min(least, Costs::decode(before.get(state >> in_bits)) + integer_error(S::kRule, __ldg(codes + state), w));
    }
    behind.set(node, Costs::encode(least));
    if (row != nullptr) row[node] = static_cast<uint16_t>(least);
  }
}

// code: the thread's words. kWide: differences wrap like 16-bit integers, at the price of one more addition per state;
// otherwise `check` says whether some code of the codebook can wrap or be clamped against one of the targets, and nodes
// at which that may matter are computed again. kWide takes a few hundredths of the steps, where that would be too many
// nodes.
template <class S, int kParity, bool kWide>
__device__ __forceinline__ void search_step(uint32_t (&code)[kCodeWords], const StepTiles<S>& tile,
                                            const SearchTables& tables, float2 reach, bool check) {
  using Costs = CostFloat<S::kRule>;
  constexpr int kInParts = S::kInParts(kParity);
  constexpr int kOutParts = S::kOutParts(kParity);
  constexpr int kTiles = S::kTiles;
  constexpr int kOuts = kOutParts * S::kY;
  const int thread = static_cast<int>(threadIdx.x);
  const int first_x = S::first_x(thread);
  // Unpacking does not depend on the step; without this the compiler does it once for all and keeps 128 floats in local
  // memory.
#pragma unroll
  for (int i = 0; i < kCodeWords; ++i) opaque(code[i]);
  float bias[kTiles], limit[kTiles];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    bias[t] = kWide ? wide_bias(tile.target[t]) : kCodeBias + tile.target[t];
    limit[t] = limit_distance<S::kRule, kWide>(tile.target[t], reach.x, reach.y);
  }
  uint32_t doubtful = 0;  // by middle and tile
#pragma unroll
  for (int n0 = 0; n0 < S::kMiddles; n0 += S::kVector) {
    const int middle0 = S::middle(thread, n0);
    float near[kTiles][S::kVector > 1 ? S::kX : 1][S::kVector * kInParts];  // in-costs of neighbouring middles
    if constexpr (S::kVector > 1) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int x = 0; x < S::kX; ++x) {
          tile.before(t).template get_many<S::kVector * kInParts>(S::in_node(kParity, middle0, 0),
                                                                  x * S::kInStride(kParity), near[t][x]);
        }
      }
    }
    int result[kTiles][kOutParts][S::kVector * S::kY];
#pragma unroll
    for (int v = 0; v < S::kVector; ++v) {
      int best[kTiles][kOuts];
      int least_in[kTiles];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        least_in[t] = INT_MAX;
#pragma unroll
        for (int o = 0; o < kOuts; ++o) best[t][o] = Costs::kSaturated;
      }
#pragma unroll
      for (int x0 = 0; x0 < S::kX; x0 += S::kChunk) {
        float in[kTiles][S::kChunk][kInParts];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
          for (int x = 0; x < S::kChunk; ++x) {
            if constexpr (S::kVector > 1) {
#pragma unroll
              for (int part = 0; part < kInParts; ++part) in[t][x][part] = near[t][x0 + x][v * kInParts + part];
            } else {
              tile.before(t).template get_many<kInParts>(S::in_node(kParity, middle0, 0),
                                                         (first_x + x0 + x) * S::kInStride(kParity), in[t][x]);
            }
          }
#pragma unroll
          for (int i = 0; i < S::kChunk * kInParts; i += 2) {
            const int a = __float_as_int(in[t][i / kInParts][i % kInParts]);
            const int b = __float_as_int(in[t][(i + 1) / kInParts][(i + 1) % kInParts]);
            least_in[t] = min3(least_in[t], a, b);
          }
        }
#pragma unroll
        for (int y = 0; y < S::kY; ++y) {
          float unpacked[S::kChunk];
#pragma unroll
          for (int x = 0; x < S::kChunk; x += 2) {
            const uint32_t word = code[S::code_word(n0 + v, x0 + x, y)];
            unpacked[x] = __int_as_float(static_cast<int>(__byte_perm(word, 0x4B000000u, 0x7610)));
            unpacked[x + 1] = __int_as_float(static_cast<int>(__byte_perm(word, 0x4B000000u, 0x7632)));
          }
          const int part = kInParts == 1 ? 0 : y >> S::kInBits(kParity);
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            int sum[S::kChunk];
#pragma unroll
            for (int x = 0; x < S::kChunk; ++x) {
              sum[x] = Costs::extend(in[t][x][part],
                                     kWide ? fabsf(unpacked[x] - bias[t]) - 32768.0f : unpacked[x] - bias[t]);
            }
            if constexpr (kOutParts == 1) {
#pragma unroll
              for (int x = 0; x < S::kChunk; x += 2) best[t][y] = min3(best[t][y], sum[x], sum[x + 1]);
            } else {
              static_assert(kOutParts == 1 || S::kChunk == 4);
              best[t][y] = min3(best[t][y], sum[0], sum[2]);
              best[t][S::kY + y] = min3(best[t][S::kY + y], sum[1], sum[3]);
            }
          }
        }
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        if constexpr (Costs::kIsPlain) {
          // An error is at most 255^2, so no branch is dearer than its in-cost and that.
          if constexpr (S::kSplit == 2) {
            least_in[t] = min(least_in[t], __shfl_xor_sync(0xFFFFFFFFu, least_in[t], 1));
            best[t][0] = min(best[t][0], __shfl_xor_sync(0xFFFFFFFFu, best[t][0], 1));
          }
          const int most = __float_as_int(__int_as_float(least_in[t]) + 65025.0f);
#pragma unroll
          for (int o = 0; o < kOuts; ++o) best[t][o] = min(best[t][o], most);
        }
        if (kWide ? S::kRule == CostRule::kDoubled : check) {
          int largest = best[t][0];
#pragma unroll
          for (int o = 1; o < kOuts; o += 2) largest = max3(largest, best[t][o], best[t][o + 1 < kOuts ? o + 1 : o]);
          if (largest > Costs::extend(__int_as_float(least_in[t]), limit[t])) doubtful |= 1u << ((n0 + v) * kTiles + t);
        }
#pragma unroll
        for (int o = 0; o < kOuts; ++o) result[t][o / S::kY][v * S::kY + o % S::kY] = Costs::finish(best[t][o]);
      }
    }
    if (S::kSplit == 1 || thread % 2 == 0) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int part = 0; part < kOutParts; ++part) {
          tile.behind(t).template set_many<S::kVector * S::kY>(S::out_node(kParity, part, middle0), result[t][part],
                                                               tile.row(t));
        }
      }
    }
  }
  while (doubtful != 0) {
    const int i = __ffs(static_cast<int>(doubtful)) - 1;
    doubtful &= doubtful - 1;
    const int middle = S::middle(thread, i / kTiles);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (i % kTiles != t) continue;
      const int fine =
          Costs::decode(Costs::extend(__int_as_float(Costs::encode(0)), limit[t]));  // no node up to here is wrong
      repair_nodes<S, kParity>(tables.codes, tile.before(t), tile.behind(t), tile.row(t), middle,
                               static_cast<int16_t>(tile.target[t]), fine);
    }
  }
}

}  // namespace espalier::codec::cuda
