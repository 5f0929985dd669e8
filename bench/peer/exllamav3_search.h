// exllamav3's trellis search restated, bit for bit and fast enough to quantize whole models with: the other side of a
// comparison, never part of the product.
//
// Costs are fp16 numbers, every operation rounded once, accumulated over the 256 steps of a pass. v1.4.1 takes the
// first pass's final node from the costs of the step before the last (the stale read); its 1.5 line reads the right
// ones and has half-bit widths. Three tiers with equal results: AVX512-FP16 instructions, AVX-512 without them, and
// portable fp32 with round-to-odd. Source: docs/formats/exl3.md, "Upstream's search"; EXL3 specification 4.1 to 4.3.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "codec/codebook.h"

namespace espalier::peer {

enum class SearchTier : uint8_t { kPortable, kAvx512, kFp16 };
// The fastest tier of this machine, and all of them, slowest first.
SearchTier best_search_tier();
std::vector<SearchTier> usable_search_tiers();

struct SearchRules {
  codec::Codebook codebook = codec::Codebook::kMul1;
  int k2 = 6;                // width in half bits; half-bit widths are searched too
  bool stale_argmin = true;  // as v1.4.1; must be false for half-bit widths
  SearchTier tier = best_search_tier();
};

// Threads: one object per thread; it owns the scratch (at most 18 MB) and may be used for any number of tiles.
class TileSearch {
 public:
  explicit TileSearch(const SearchRules& rules);
  ~TileSearch();
  TileSearch(TileSearch&&) noexcept;
  TileSearch& operator=(TileSearch&&) noexcept;

  // tile [256]:f32 targets in ring order, magnitude below 60000 (checked); states [256]:u16. When costs overflow
  // everywhere (targets beyond about 200) v1.4.1 reads out of bounds; then node 0 is taken, as the 1.5 line does.
  void run(const float* tile, uint16_t* states);

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace espalier::peer
