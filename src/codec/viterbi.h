// Trellis search: for each tile of 256 numbers in ring order, the ring of states whose codebook values are nearest in squared
// error, by two Viterbi passes (the first finds the boundary node, the second closes the ring through it).
//
// Costs are saturating 16-bit integers; a tile whose path meets a saturated step, or whose ring does not
// close, is searched again with fp32 costs. The arithmetic, ties included (smallest branch, then smallest node), is defined by
// the portable tier and equal in all tiers, so states depend on nothing but the tile, the width and the codebook.
// Source: docs/formats/exl3.md, "Encoding"; docs/decisions/codec-integer-costs.md.
#pragma once

#include <cstdint>

#include "base/simd_tier.h"
#include "base/thread_pool.h"
#include "codec/codebook.h"
#include "codec/trellis.h"

namespace espalier::codec {

enum class CostKind : uint8_t {
  kAuto,   // 16-bit integers with the fp32 fallback
  kFloat,  // fp32 for every tile
};

struct SearchOptions {
  Codebook codebook = Codebook::kMul1;
  int k2 = 6;          // width in half bits: 2..16 even, and with mul1 3, 5, 7
  int n_cuts = 1;      // 1, 2 or 4 places to close the ring at; the best result is kept. Cost is proportional.
  CostKind costs = CostKind::kAuto;
  SimdTier tier = active_simd_tier();
};

// True when search_tiles serves this width. Half-integer widths exist for mul1 only.
constexpr bool is_searchable_width(int k2, Codebook codebook = Codebook::kMul1) {
  return is_width(k2) && (k2 % 2 == 0 || codebook == Codebook::kMul1);
}

// tiles  [n_tiles, 256]:f32  targets in ring order, codebook units, finite (checked)
// states [n_tiles, 256]:u16  written
// Threads: over tiles; the result does not depend on their number. Scratch is kept per thread and reused.
void search_tiles(ThreadPool& pool, const float* tiles, int64_t n_tiles, const SearchOptions& options, uint16_t* states);
// One tile on the calling thread; the same result.
void search_tile(const float* tile, const SearchOptions& options, uint16_t* states);

// Sum of squared differences between the tile and the decoded states, in fp64, ascending position.
double tile_error(const float* tile, const uint16_t* states, Codebook codebook);

}  // namespace espalier::codec
