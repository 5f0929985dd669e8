// module: codec
// mutations: 150
// The trellis search on any targets: every tier finds the same states, they form a ring that survives packing, and more
// cuts never make the result worse.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include "base/check.h"
#include "codec/viterbi.h"

namespace {

using namespace espalier;
using namespace espalier::codec;

// Byte 3: multiples of a power of two between 2^-24 and 2^7; from 128 on any float that the search accepts.
std::vector<float> make_tile(const uint8_t* data, size_t size, uint8_t kind) {
  std::vector<float> tile(kTileSize);
  for (size_t i = 0; i < tile.size(); ++i) {
    uint8_t bytes[4];
    for (size_t b = 0; b < 4; ++b) bytes[b] = data[(4 * i + b) % size];
    if (kind >= 128) {
      std::memcpy(&tile[i], bytes, sizeof bytes);
      if (!(std::fabs(tile[i]) < 1e15f)) tile[i] = 0;
    } else {
      int16_t v = 0;
      std::memcpy(&v, bytes, sizeof v);
      tile[i] = std::ldexp(static_cast<float>(v), kind % 32 - 24);
    }
  }
  return tile;
}

std::vector<uint16_t> search(const std::vector<float>& tile, SearchOptions options, SimdTier tier) {
  options.tier = tier;
  std::vector<uint16_t> states(kTileSize);
  search_tile(tile.data(), options, states.data());
  return states;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 8) return 0;
  constexpr int kWidths[] = {2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16};
  constexpr Codebook kCodebooks[] = {Codebook::kMul1, Codebook::kMcg, Codebook::k3Inst};
  SearchOptions options;
  options.k2 = kWidths[data[0] % std::size(kWidths)];
  options.codebook = kCodebooks[data[1] % 3];
  if (!is_searchable_width(options.k2, options.codebook)) return 0;
  options.costs = data[1] >= 192 ? CostKind::kFloat : CostKind::kAuto;
  options.n_cuts = (data[2] & 3) == 3 ? 2 : 1;
  const std::vector<float> tile = make_tile(data + 4, size - 4, data[3]);

  const std::vector<uint16_t> states = search(tile, options, best_simd_tier());
  for (SimdTier tier : usable_simd_tiers()) {
    CHECK(search(tile, options, tier) == states) << simd_tier_name(tier) << " K = " << width_text(options.k2);
  }
  if (data[2] >= 240) {  // plain loops, far slower
    CHECK(search(tile, options, SimdTier::kReference) == states) << "reference, K = " << width_text(options.k2);
  }
  CHECK(is_ring(states.data(), options.k2));
  std::vector<uint16_t> words(static_cast<size_t>(tile_words(options.k2)));
  std::vector<uint16_t> back(kTileSize);
  pack_tile(states.data(), options.k2, words.data());
  unpack_tile(words.data(), options.k2, back.data());
  CHECK(back == states);
  if (options.n_cuts > 1) {
    SearchOptions one = options;
    one.n_cuts = 1;
    const double error = tile_error(tile.data(), search(tile, one, best_simd_tier()).data(), options.codebook);
    CHECK(tile_error(tile.data(), states.data(), options.codebook) <= error);
  }
  return 0;
}
