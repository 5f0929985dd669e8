// The kernel around BlockSearch: blocks draw units of work, plain tiles or steps of LDLQ strips. Internal to the GPU
// search.
#pragma once

#include "codec/cuda/viterbi_block.cuh"
#include "codec/cuda/viterbi_variant.h"

namespace espalier::codec {

namespace cuda {

// Ring position of row-major element (i, c) of a tile.
__device__ inline int ring_position(int i, int c) {
  return 8 * (4 * (c % 8) + i % 8 / 2) + ((i & 1) | (i / 8 << 1) | (c / 8 << 2));
}

// A chain of factors[j] * values[j * stride] over ascending j, each product and sum rounded. n is a multiple of 16,
// `factors` even.
__device__ inline double chain(const double* factors, const double* values, int64_t stride, int n) {
  double sum = 0;
  constexpr int kAhead = 16;  // loads in flight
#pragma unroll 1
  for (int j = 0; j < n; j += kAhead) {
    double f[kAhead], v[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) v[a] = values[(j + a) * stride];
#pragma unroll
    for (int a = 0; a < kAhead; a += 2) {
      const double2 pair = *reinterpret_cast<const double2*>(factors + j + a);
      f[a] = pair.x;
      f[a + 1] = pair.y;
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) sum = __dadd_rn(sum, __dmul_rn(f[a], v[a]));
  }
  return sum;
}

// The columns of a unit's tiles: [column + t * step, + 16).
struct Columns {
  int column = 0;
  int step = kTile;
};

// Targets of a unit's tiles into shared.tile: weight + feedback from below (+ from the right), see
// codec/column_encoder.cpp.
template <class S>
__device__ void ldlq_targets(SearchShared<S::kTiles>& s, const LdlqMatrix& m, int k, int n, int block, Columns at) {
  const int thread = static_cast<int>(threadIdx.x);
  const int t = thread / kTileSize;
  if (t >= S::kTiles) return;
  const int i = thread % kTileSize / kTile;
  const int c = thread % kTile;
  const int64_t row = int64_t{block} * kTile + i;
  const int64_t col = at.column + t * at.step + c;
  const int below = (block + 1) * kTile;
  const double inner = chain(m.feedback + row * k + below, m.error + int64_t{below} * n + col, n, k - below);
  double target = __dadd_rn(m.weight[row * n + col], inner);
  if (m.output_feedback != nullptr) {
    s.inner[t][thread % kTileSize] = inner;
    const int in_group = static_cast<int>(col % kBlock);
    const int right = in_group / kTile * kTile + kTile;
    const int64_t group = col / kBlock;
    const double* factors = m.output_feedback + group * kBlock * kBlock + in_group * kBlock;
    target =
        __dadd_rn(target, chain(factors + right, m.corrected + row * n + group * kBlock + right, 1, kBlock - right));
  }
  target = target < -1e6 ? -1e6 : target > 1e6 ? 1e6 : target;
  s.tile[t][ring_position(i, c)] = static_cast<float>(target);
}

// Errors and packed words of a unit's tiles from shared.states.
template <class S>
__device__ void ldlq_store(const SearchShared<S::kTiles>& s, const SearchTables& tables, const LdlqMatrix& m, int n,
                           int block, Columns at) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int e = thread; e < S::kTiles * kTileSize; e += kSearchThreads) {
    const int t = e / kTileSize;
    const int i = e % kTileSize / kTile;
    const int c = e % kTile;
    const int64_t to = (int64_t{block} * kTile + i) * n + at.column + t * at.step + c;
    const double error = __dsub_rn(m.weight[to], double{tables.values[s.states[t][ring_position(i, c)]]});
    m.error[to] = error;
    if (m.output_feedback != nullptr) m.corrected[to] = __dadd_rn(error, s.inner[t][e % kTileSize]);
  }
  constexpr int kWords = 4 * S::kK2;  // of 32 ring bits, the first in the highest bit
  for (int e = thread; e < S::kTiles * kWords; e += kSearchThreads) {
    const int t = e / kWords;
    const int word = e % kWords;
    uint32_t bits = 0;
    for (int p = word * 32 / S::kK2 * 2; p < kTileSize; ++p) {
      const int width = step_bits(S::kK2, p);
      const int end = window_end(S::kK2, p);
      if (end - width >= (word + 1) * 32) break;
      const uint32_t fresh = s.states[t][p] & ((1u << width) - 1u);
      const int up = (word + 1) * 32 - end;  // from the lowest bit of the word
      bits |= up >= 0 ? (up < 32 ? fresh << up : 0u) : fresh >> -up;
    }
    uint32_t* tile = reinterpret_cast<uint32_t*>(m.trellis) +
                     (int64_t{block} * (n / kTile) + (at.column + t * at.step) / kTile) * kWords;
    tile[word] = bits;
  }
}

__device__ inline void wait_for(const int* progress, int value) {
  while (*static_cast<const volatile int*>(progress) < value) {
  }
}

// Whether this architecture's blocks can have the shared memory; what they cannot run is not compiled.
template <class S>
constexpr bool fits_architecture() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  return BlockSearch<S>::kWorkOffset + BlockSearch<S>::kWorkBytes <= 99 * 1024;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return BlockSearch<S>::kWorkOffset + BlockSearch<S>::kWorkBytes <= 163 * 1024;
#else
  return true;
#endif
}

template <class S>
__device__ __forceinline__ void run_search(const SearchWork& work) {
  using Search = BlockSearch<S>;
  typename Search::Shared& s = *reinterpret_cast<typename Search::Shared*>(search_shared);
  const int64_t n_block = blockIdx.x;
  const SearchScratch scratch{work.rows + n_block * work.row_bytes,
                              work.costs == nullptr ? nullptr : work.costs + n_block * 2 * S::kNodes(0),
                              work.arrays + n_block * S::kTileBytes * S::kTiles};
  Search search(work.tables, scratch);
  const int thread = static_cast<int>(threadIdx.x);
  constexpr int kSteps = kBlock / kTile;  // strips of a 128-column group
  for (;;) {
    if (thread == 0) s.drawn = atomicAdd(&work.counters[0], 1u);
    __syncthreads();
    const int64_t unit = s.drawn;
    __syncthreads();
    if (unit >= work.n_units) return;
    int chain_of = 0, done = 0;
    LdlqMatrix m;
    Columns at;
    if (work.matrices == nullptr) {
      for (int i = thread; i < S::kTiles * kTileSize; i += kSearchThreads) {
        const int64_t from = (unit * S::kTiles) * kTileSize + i;
        const int64_t last = work.n_tiles * kTileSize;
        s.tile[i / kTileSize][i % kTileSize] =
            work.tiles[from < last ? from : from - kTileSize];  // an odd last tile is searched twice
      }
    } else {
      // Units come in an order in which every unit follows those it waits for, so whoever holds those is running.
      if (work.two_sided) {  // by antidiagonals: a unit waits for the row block below and for the strip to its right
        const int n_sets = work.n_chains / kSteps;
        const int left = static_cast<int>(unit / n_sets % kSteps);  // strips to the right of this one in its group
        done = static_cast<int>(unit / work.n_chains) - left;
        if (done < 0 || done >= work.k / kTile) continue;
        const int set = static_cast<int>(unit % n_sets);
        chain_of = set * kSteps + kSteps - 1 - left;
        const int per_matrix = work.n / (kBlock * S::kTiles);
        m = work.matrices[set / per_matrix];
        at.column = set % per_matrix * kBlock * S::kTiles + (kSteps - 1 - left) * kTile;
        at.step = kBlock;
        if (thread == 0 && left > 0) wait_for(&work.progress[chain_of + 1], done + 1);
      } else {  // row block by row block from the last on
        chain_of = static_cast<int>(unit % work.n_chains);
        done = static_cast<int>(unit / work.n_chains);
        const int per_matrix = work.n / (kTile * S::kTiles);
        m = work.matrices[chain_of / per_matrix];
        at.column = chain_of % per_matrix * kTile * S::kTiles;
      }
      if (thread == 0) {
        wait_for(&work.progress[chain_of], done);
        __threadfence();
      }
      __syncthreads();
      ldlq_targets<S>(s, m, work.k, work.n, work.k / kTile - 1 - done, at);
    }
    __syncthreads();
    const int n_failed = search.run(work.n_cuts, work.only_float);
    if (thread == 0 && n_failed > 0) atomicAdd(&work.counters[1], static_cast<unsigned>(n_failed));
    if (work.matrices == nullptr) {
      for (int i = thread; i < S::kTiles * kTileSize; i += kSearchThreads) {
        const int64_t to = (unit * S::kTiles) * kTileSize + i;
        if (to < work.n_tiles * kTileSize) work.states[to] = s.states[i / kTileSize][i % kTileSize];
      }
    } else {
      ldlq_store<S>(s, work.tables, m, work.n, work.k / kTile - 1 - done, at);
      __threadfence();
      __syncthreads();
      if (thread == 0) *static_cast<volatile int*>(&work.progress[chain_of]) = done + 1;
    }
    __syncthreads();
  }
}

template <class S>
__global__ void __launch_bounds__(kSearchThreads, 1) search_kernel(const __grid_constant__ SearchWork work) {
  if constexpr (fits_architecture<S>()) run_search<S>(work);
}

template <class S>
void place_codes(const int16_t* codes, uint32_t* words, float* reach) {
  for (int thread = 0; thread < kSearchThreads; ++thread) {
    float least = 65536, most = -65536;
    for (int n = 0; n < S::kMiddles; ++n) {
      for (int x = 0; x < S::kX; ++x) {
        for (int y = 0; y < S::kY; ++y) {
          const int code = codes[S::state(S::first_x(thread) + x, S::middle(thread, n), y)];
          words[S::code_word(n, x, y) * kSearchThreads + thread] |= static_cast<uint32_t>(code + 32768) << (x % 2 * 16);
          least = code < least ? static_cast<float>(code) : least;
          most = code > most ? static_cast<float>(code) : most;
        }
      }
    }
    reach[2 * thread] = least;
    reach[2 * thread + 1] = most;
  }
}

template <class S>
SearchVariant make_variant() {
  using Search = BlockSearch<S>;
  constexpr int kShared = Search::kWorkOffset + Search::kWorkBytes;
  SearchVariant v;
  v.k2 = S::kK2;
  v.tiles = S::kTiles;
  v.shared_bytes = kShared;
  v.array_bytes = S::kInShared ? 0 : S::kTiles * S::kTileBytes;
  v.row_bytes = search_row_bytes(S::kK2, S::kSegment);
  v.float_nodes = Search::kFloatsFit ? 0 : S::kNodes(0);
  v.place_codes = place_codes<S>;
  v.launch = [](const SearchWork& work, int n_blocks, cudaStream_t stream) {
    const cudaError_t status =
        cudaFuncSetAttribute(search_kernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
    if (status != cudaSuccess) return status;
    search_kernel<S><<<static_cast<unsigned>(n_blocks), kSearchThreads, kShared, stream>>>(work);
    return cudaPeekAtLastError();
  };
  return v;
}

}  // namespace cuda

}  // namespace espalier::codec
