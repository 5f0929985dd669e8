// What the host knows of the search kernels: their arguments and how to start them. Internal to the GPU search.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "codec/cuda/viterbi.h"

namespace espalier::codec {

namespace cuda {

inline constexpr int kSearchThreads = 512;
inline constexpr int kCodeWords = 64;  // registers of a thread that hold its codes, two each

// Tables of a codebook and width in device memory.
struct SearchTables {
  const uint32_t* words = nullptr;  // [64, 512]: codes + 32768, two a word, as SearchShape::code_word places them
  const float* reach = nullptr;     // [512, 2]: least and largest code of a thread
  const int16_t* codes = nullptr;   // [65536], by state
  const float* values = nullptr;    // [65536], the codebook itself
  float unit = 1;                   // codes per codebook unit
  float farthest = 0;               // largest |code|
};

}  // namespace cuda

// Arguments of the kernel. A unit is kTiles neighbouring tiles; with LDLQ, kTiles strips of 16 columns at one row
// block: neighbours, or with feedback along the outputs the strips at one place of neighbouring 128-column groups.
struct SearchWork {
  cuda::SearchTables tables;
  unsigned char* rows = nullptr;  // per block
  int64_t row_bytes = 0;
  float* costs = nullptr;           // per block, 2 * n_nodes floats, or null
  unsigned char* arrays = nullptr;  // per block, cost arrays where shared memory is too small, or null
  unsigned* counters = nullptr;
  int n_cuts = 1;
  bool only_float = false;
  int64_t n_units = 0;
  // plain tiles
  const float* tiles = nullptr;
  uint16_t* states = nullptr;
  int64_t n_tiles = 0;
  // LDLQ
  const LdlqMatrix* matrices = nullptr;  // null: plain tiles
  int* progress = nullptr;               // per unit of one row block: row blocks done
  int k = 0, n = 0;
  int n_chains = 0;  // units of one row block, all matrices
  bool two_sided = false;
};

// How one kind of kernel is set up and started.
struct SearchVariant {
  int k2 = 0;
  int tiles = 0;
  int shared_bytes = 0;   // of a block
  int array_bytes = 0;    // device memory of a block for cost arrays; 0 when they are in shared memory
  int64_t row_bytes = 0;  // device memory of a block for kept vectors
  int float_nodes = 0;    // nodes for which fp32 costs need device memory; 0 when they fit shared memory
  void (*place_codes)(const int16_t* codes, uint32_t* words,
                      float* reach) = nullptr;  // fills SearchTables::words, ::reach
  cudaError_t (*launch)(const SearchWork& work, int n_blocks, cudaStream_t stream) = nullptr;
};

// The kernels, by file; within a width the preferred one first.
std::vector<SearchVariant> search_variants_low();     // K <= 2
std::vector<SearchVariant> search_variants_middle();  // 2.5 ... 4
std::vector<SearchVariant> search_variants_high();    // K >= 5

}  // namespace espalier::codec
