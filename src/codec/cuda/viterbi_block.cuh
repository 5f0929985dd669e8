// The whole search for kTiles tiles by one block: the same states as codec/viterbi.cpp, bit for bit. Internal to the
// GPU search.
#pragma once

#include "codec/cuda/viterbi_step.cuh"
#include "codec/cuda/viterbi_trace.cuh"

namespace espalier::codec::cuda {

// Shared memory of a block, in front of the cost arrays. Cost arrays: per tile those in front of even, then of odd
// positions.
template <int kTiles>
struct SearchShared {
  float tile[kTiles][kTileSize];       // in: targets in ring order
  uint16_t states[kTiles][kTileSize];  // out
  float target[kTiles][kTileSize];     // of the cut at hand: in units for integer costs
  uint16_t found[kTiles][kTileSize];
  double inner[kTiles][kTileSize];  // LDLQ: what the errors below add to a target
  double error[kTiles];
  unsigned long long best_node[kTiles];
  unsigned drawn;  // unit of work
  int warp_least[kTiles][kSearchWarps];
  int boundary[kTiles];
  int failed[kTiles];
};

// Device memory of a block.
struct SearchScratch {
  void* rows =
      nullptr;  // kept cost vectors: [128 segments at most, nodes] floats, which is also enough for two tiles' integers
  float* costs = nullptr;           // two cost vectors of floats, for widths at which shared memory cannot hold them
  unsigned char* arrays = nullptr;  // cost arrays without kInShared
};
constexpr int64_t search_row_bytes(int k2, int segment) {
  return int64_t{256} / segment * (65536 >> step_bits(k2, 0)) * 4;
}

__device__ inline int to_units(double x, double unit) {
  const double scaled = floor(__dadd_rn(__dmul_rn(x, unit), 0.5));
  return static_cast<int>(scaled < -32767 ? -32767 : scaled > 32767 ? 32767 : scaled);
}

template <class S>
class BlockSearch {
 public:
  using Shared = SearchShared<S::kTiles>;
  using Costs = CostFloat<S::kRule>;
  static constexpr int kTiles = S::kTiles;
  using Scratch = TraceScratch<S::kK2, S::kSegment>;
  static constexpr bool kFloatsFit =
      S::kInShared && 2 * 4 * S::kNodes(0) <= kTiles * S::kTileBytes;  // fp32 costs in shared memory
  static constexpr int kTraceBytes = static_cast<int>(sizeof(Scratch)) * kTiles;

  // Shared memory: `Shared` at its beginning, then kWorkBytes from kWorkOffset on.
  static constexpr int kWorkOffset = (static_cast<int>(sizeof(Shared)) + 15) / 16 * 16;
  static constexpr int kWorkBytes =
      S::kInShared && kTiles * S::kTileBytes > kTraceBytes ? kTiles* S::kTileBytes : kTraceBytes;

  __device__ BlockSearch(const SearchTables& tables, const SearchScratch& scratch)
      : s_(*reinterpret_cast<Shared*>(search_shared)),
        traces_(reinterpret_cast<Scratch*>(search_shared + kWorkOffset)),
        base_(scratch.arrays),
        arrays_(S::kInShared ? kWorkOffset : 0),
        tables_(tables),
        scratch_(scratch) {}

  // shared.tile -> shared.states, whole block. n_cuts as in SearchOptions; `only_float` searches with fp32 costs at
  // once. Returns the number of searches with fp32 costs.
  __device__ int run(int n_cuts, bool only_float) {
    const int thread = static_cast<int>(threadIdx.x);
    int n_float = 0;
    for (int cut = 0; cut < n_cuts; ++cut) {
      const int shift = cut * kTileSize / n_cuts;
      n_float += search_cut(shift, only_float);
      if (n_cuts == 1) {
        copy_found(0, 0, kTiles);
        __syncthreads();
        return n_float;
      }
      if (thread % 32 == 0 && thread / 32 < kTiles) {
        const int t = thread / 32;
        double sum = 0;
        for (int p = 0; p < kTileSize; ++p) {
          const double d = __dsub_rn(double{tables_.values[s_.found[t][(p + kTileSize - shift) % kTileSize]]},
                                     double{s_.tile[t][p]});
          sum = __dadd_rn(sum, __dmul_rn(d, d));
        }
        s_.failed[t] = cut == 0 || sum < s_.error[t];  // whether to take it
        if (s_.failed[t] != 0) s_.error[t] = sum;
      }
      __syncthreads();
      for (int t = 0; t < kTiles; ++t) {
        if (s_.failed[t] != 0) copy_found(shift, t, t + 1);
      }
      __syncthreads();
    }
    return n_float;
  }

 private:
  __device__ void copy_found(int shift, int begin, int end) {
    for (int i = static_cast<int>(threadIdx.x); i < (end - begin) * kTileSize; i += kSearchThreads) {
      const int t = begin + i / kTileSize;
      s_.states[t][(i + shift) % kTileSize] = s_.found[t][i % kTileSize];
    }
  }

  __device__ int search_cut(int shift, bool only_float) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < kTiles) s_.failed[thread] = only_float;
    if (!only_float) {
      for (int i = thread; i < kTiles * kTileSize; i += kSearchThreads) {
        s_.target[i / kTileSize][i % kTileSize] =
            static_cast<float>(to_units(double{s_.tile[i / kTileSize][(i + shift) % kTileSize]}, double{tables_.unit}));
      }
      __syncthreads();
      search_integer();
    }
    __syncthreads();
    int n_float = 0;
    for (int t = 0; t < kTiles; ++t) {
      if (s_.failed[t] == 0) continue;
      search_float(t, shift);
      ++n_float;
    }
    __syncthreads();
    return n_float;
  }

  // ---- integer costs ----

  __device__ CostArray<S> array(int t, int parity) const {
    return {base_, arrays_ + t * S::kTileBytes + (parity == 0 ? 0 : S::kSideBytes(0))};
  }
  __device__ uint16_t* row(int t, int segment) const {
    return static_cast<uint16_t*>(scratch_.rows) + t * S::kRowsOfTile + segment * S::kRowNodes;
  }

  __device__ void search_integer() {
    const int thread = static_cast<int>(threadIdx.x);
    const float2 reach = reinterpret_cast<const float2*>(tables_.reach)[thread];
    constexpr int kHalf = kTileSize / 2;
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      // Pass 0: free start at position 128, over 255 and 0, to 127; vectors are kept from position 0 on. Pass 1: from
      // the boundary node; the last segment needs no vectors.
      const int n_steps = pass == 0 ? kTileSize : kTileSize - S::kSegment;
      uint32_t code[kCodeWords];
#pragma unroll
      for (int i = 0; i < kCodeWords; ++i) code[i] = __ldg(tables_.words + i * kSearchThreads + thread);
      for (int t = 0; t < kTiles; ++t) {
        const CostArray<S> first = array(t, 0);
        const int boundary = pass == 0 ? -1 : s_.boundary[t];
        for (int e = thread; e < S::kRowNodes; e += kSearchThreads) {
          first.set(e, Costs::encode(boundary < 0 || e == boundary ? 0 : kMostCost));
        }
      }
      __syncthreads();
      for (int i = 0; i < n_steps; ++i) {
        const int position = pass == 0 ? (i + kHalf) % kTileSize : i;
        const int done = pass == 0 ? i + 1 - kHalf : i + 1;  // steps behind the boundary
        const bool subtract = i % S::kPeriod == S::kPeriod - 1;
        const int kept = done >= 0 && done % S::kSegment == 0 && (pass == 1 || done < kHalf) ? done / S::kSegment : -1;
        StepTiles<S> tile;
        tile.before_first = array(0, i & 1);
        tile.behind_first = array(0, (i & 1) ^ 1);
        tile.row_first = kept >= 0 && !subtract ? row(0, kept) : nullptr;
        bool check = false, wide = false;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          tile.target[t] = s_.target[t][position];
          const float magnitude = fabsf(tile.target[t]);
          check = check || magnitude >= safe_target();
          wide = wide || magnitude >= wide_target();
        }
        if (S::kK2 % 2 == 0 || (i & 1) == 0) {
          step<0>(code, tile, reach, check, wide);
        } else {
          step<1>(code, tile, reach, check, wide);
        }
        __syncthreads();
        if (subtract) subtract_minimum(kept);
      }
      if (pass == 0) find_best_node();
      __syncthreads();
      trace(pass);
    }
    for (int i = thread; i < kTiles * kTileSize; i += kSearchThreads) {
      const int t = i / kTileSize;
      const int p = i % kTileSize;
      const float w = s_.target[t][p];
      const bool exact =
          !is_inexact(S::kRule, tables_.codes[s_.found[t][p]], static_cast<int16_t>(w)) && w > -32767 && w < 32767;
      if (!exact) s_.failed[t] = 1;
    }
  }

  // Targets up to this magnitude meet no code whose difference wraps or is clamped (for clipped errors: wraps into what
  // is not clipped).
  __device__ float safe_target() const {
    constexpr float kRange = S::kRule == CostRule::kDoubled  ? 16384.0f
                             : S::kRule == CostRule::kSquare ? 32768.0f
                                                             : 65536.0f - 255.0f;
    return kRange - tables_.farthest;
  }

  // From here on so many nodes would have to be computed again that the wrapping arithmetic is cheaper.
  __device__ float wide_target() const {
    constexpr float kUnits = S::kK2 <= 3 ? 0.0f : S::kK2 == 4 ? 1.8f : S::kRule == CostRule::kDoubled ? 1.8f : 2.1f;
    return S::kRule == CostRule::kClipped ? 65536.0f : fmaxf(kUnits * tables_.unit, safe_target());
  }

  template <int kParity>
  __device__ __forceinline__ void step(uint32_t (&code)[kCodeWords], const StepTiles<S>& tile, float2 reach, bool check,
                                       bool wide) {
    if constexpr (S::kRule == CostRule::kClipped) {
      search_step<S, kParity, false>(code, tile, tables_, reach, check);
    } else if (wide) {
      search_step<S, kParity, true>(code, tile, tables_, reach, false);
    } else {
      search_step<S, kParity, false>(code, tile, tables_, reach, check);
    }
  }

  // After an odd position: costs -= their minimum; writes the row `kept` if not negative.
  __device__ void subtract_minimum(int kept) {
    const int thread = static_cast<int>(threadIdx.x);
    for (int t = 0; t < kTiles; ++t) {
      const CostArray<S> costs = array(t, 0);
      int least = INT_MAX;
#pragma unroll 4
      for (int e = 4 * thread; e < S::kRowNodes; e += 4 * kSearchThreads) {
        float c[4];
        costs.template get_many<4>(e, 0, c);
        least =
            min3(min3(least, __float_as_int(c[0]), __float_as_int(c[1])), __float_as_int(c[2]), __float_as_int(c[3]));
      }
      least = static_cast<int>(__reduce_min_sync(0xFFFFFFFFu, static_cast<unsigned>(least)));
      if (thread % 32 == 0) s_.warp_least[t][thread / 32] = least;
    }
    __syncthreads();
    for (int t = 0; t < kTiles; ++t) {
      int least = s_.warp_least[t][0];
#pragma unroll
      for (int i = 1; i < kSearchWarps; ++i) least = min(least, s_.warp_least[t][i]);
      least = Costs::decode(least);
      if (thread == 0 && least > 32768) s_.failed[t] = 1;
      const CostArray<S> costs = array(t, 0);
      uint16_t* const kept_row = kept >= 0 ? row(t, kept) : nullptr;
#pragma unroll 4
      for (int e = 4 * thread; e < S::kRowNodes; e += 4 * kSearchThreads) {
        float c[4];
        costs.template get_many<4>(e, 0, c);
        int bits[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          bits[i] =
              Costs::kIsPlain ? __float_as_int(c[i] - static_cast<float>(least)) : __float_as_int(c[i]) - (least << 6);
        }
        costs.template set_many<4>(e, bits, kept_row);
      }
    }
    __syncthreads();
  }

  // The first node of least cost behind position 127, into best_node's lower half.
  __device__ void find_best_node() {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < kTiles) s_.best_node[thread] = ~0ull;
    __syncthreads();
    for (int t = 0; t < kTiles; ++t) {
      const CostArray<S> costs = array(t, 0);
      unsigned best = ~0u;
      for (int e = thread; e < S::kRowNodes; e += kSearchThreads) {
        best = min(best, (static_cast<unsigned>(Costs::decode(costs.get(e))) << 15) | static_cast<unsigned>(e));
      }
      best = __reduce_min_sync(0xFFFFFFFFu, best);
      if (thread % 32 == 0) atomicMin(&s_.best_node[t], static_cast<unsigned long long>(best));
    }
  }

  // Warp t traces tile t; the others wait.
  __device__ void trace(int pass) {
    const int t = static_cast<int>(threadIdx.x) / 32;
    if (t < kTiles) {
      const int end = pass == 0 ? static_cast<int>(s_.best_node[t] & 32767u) : s_.boundary[t];
      const int n_segments = kTileSize / 2 * (pass + 1) / S::kSegment;
      const int node = trace_back<IntegerTrace<S::kRule>, S::kK2, S::kSegment>(
          tables_, row(t, 0), n_segments, end, pass == 0 ? -1 : end, s_.target[t], s_.found[t], traces_[t]);
      if (threadIdx.x % 32 == 0) {
        if (pass == 0) s_.boundary[t] = node;
        if (pass == 1 && node != end) s_.failed[t] = 1;
      }
    }
    __syncthreads();
  }

  // ---- fp32 costs, for the few tiles at which integers reach a limit ----

  __device__ void search_float(int t, int shift) {
    const int thread = static_cast<int>(threadIdx.x);
    constexpr int kHalf = kTileSize / 2;
    float* const first_side = kFloatsFit ? reinterpret_cast<float*>(search_shared + kWorkOffset) : scratch_.costs;
    float* const side[2] = {first_side, first_side + S::kNodes(0)};
    float* const rows = static_cast<float*>(scratch_.rows);
    float* const target = s_.target[t];
    for (int p = thread; p < kTileSize; p += kSearchThreads) target[p] = s_.tile[t][(p + shift) % kTileSize];
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      const int n_steps = pass == 0 ? kTileSize : kTileSize - S::kSegment;
      const int boundary = pass == 0 ? -1 : s_.boundary[t];
      for (int e = thread; e < S::kRowNodes; e += kSearchThreads) {
        side[0][e] = boundary < 0 || e == boundary ? 0.0f : __int_as_float(0x7F800000);
      }
      __syncthreads();
      for (int i = 0; i < n_steps; ++i) {
        const float w = target[pass == 0 ? (i + kHalf) % kTileSize : i];
        const int done = pass == 0 ? i + 1 - kHalf : i + 1;
        float* const kept = done >= 0 && done % S::kSegment == 0 && (pass == 1 || done < kHalf)
                                ? rows + static_cast<int64_t>(done / S::kSegment) * S::kRowNodes
                                : nullptr;
        if (S::kK2 % 2 == 0 || (i & 1) == 0) {
          float_step<0>(side[i & 1], side[(i & 1) ^ 1], kept, w);
        } else {
          float_step<1>(side[i & 1], side[(i & 1) ^ 1], kept, w);
        }
        __syncthreads();
      }
      if (pass == 0) {
        if (thread == 0) s_.best_node[t] = ~0ull;
        __syncthreads();
        unsigned long long best = ~0ull;
        for (int e = thread; e < S::kRowNodes; e += kSearchThreads) {
          best = min(best,
                     (static_cast<unsigned long long>(__float_as_uint(side[0][e])) << 32) | static_cast<unsigned>(e));
        }
        atomicMin(&s_.best_node[t], best);
      }
      __syncthreads();
      const int end = pass == 0 ? static_cast<int>(s_.best_node[t] & 0xFFFFFFFFull) : boundary;
      if (thread / 32 == 0) {
        const int node = trace_back<FloatTrace, S::kK2, S::kSegment>(tables_, rows, kHalf * (pass + 1) / S::kSegment,
                                                                     end, boundary, target, s_.found[t], traces_[0]);
        if (thread == 0 && pass == 0) s_.boundary[t] = node;
      }
      __syncthreads();
    }
  }

  template <int kParity>
  __device__ void float_step(const float* before, float* behind, float* kept, float w) const {
    constexpr int in_bits = S::kInBits(kParity);
    constexpr int out_bits = S::kOutBits(kParity);
    for (int node = static_cast<int>(threadIdx.x); node < (65536 >> out_bits); node += kSearchThreads) {
      float least = __int_as_float(0x7F800000);
#pragma unroll 8
      for (int q = 0; q < (1 << out_bits); ++q) {
        const int state = (q << (16 - out_bits)) | node;
        const float d = __fsub_rn(__ldg(tables_.values + state), w);
        least = fminf(least, __fadd_rn(before[state >> in_bits], __fmul_rn(d, d)));
      }
      behind[node] = least;
      if (kept != nullptr) kept[node] = least;
    }
  }

  Shared& s_;
  Scratch* traces_;  // by tile, where the cost arrays are during a pass
  unsigned char* base_;
  int arrays_;  // offset of the cost arrays
  const SearchTables& tables_;
  const SearchScratch& scratch_;
};

}  // namespace espalier::codec::cuda
