// The comparison's search is the one that made the golden files: published vectors, golden tiles, and the plain
// restatement.
#include "bench/peer/exllamav3_search.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/rng.h"
#include "codec/viterbi.h"
#include "bench/peer/golden_cases.h"
#include "tests/unit/codec/upstream_search.h"
#include "tests/unit/codec/vectors.h"

namespace espalier::peer {
namespace {

using codec::Codebook;
using codec::kTileSize;

float gaussian(const CounterRng& rng, uint64_t i) {
  return static_cast<float>(std::sqrt(-2 * std::log(1 - rng.uniform(2 * i))) *
                            std::cos(6.283185307179586 * rng.uniform(2 * i + 1)));
}

class PeerSearch : public testing::TestWithParam<SearchTier> {};

TEST_P(PeerSearch, published_vectors_come_out_bit_for_bit) {
  constexpr int64_t n_vectors = std::size(codec::vectors::kSearchVectors);
  ThreadPool pool(2);
  pool.parallel_for(n_vectors, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const codec::vectors::SearchVector& v = codec::vectors::kSearchVectors[i];
      const Codebook codebook = static_cast<Codebook>(v.codebook);
      float tile[kTileSize];
      for (uint32_t p = 0; p < kTileSize; ++p) {
        tile[p] = codec::vectors::search_input(p) * (codebook == Codebook::kMul1 ? 1.0f : 1.25f);
      }
      uint16_t states[kTileSize];
      TileSearch({codebook, 2 * v.width, true, GetParam()}).run(tile, states);
      EXPECT_EQ(codec::vectors::crc32(states, sizeof states), v.crc_states)
          << "K = " << v.width << " codebook " << v.codebook;
      TileSearch({codebook, 2 * v.width, false, GetParam()}).run(tile, states);
      EXPECT_EQ(codec::vectors::crc32(states, sizeof states), v.crc_fixed)
          << "K = " << v.width << " codebook " << v.codebook;
    }
  });
}

TEST_P(PeerSearch, golden_tile_sets_come_out_bit_for_bit) {
  const SafetensorsFile file = codec::golden::open(codec::golden::tree_file("codebooks_tiles.safetensors"));
  std::vector<std::string> sets;
  for (const TensorEntry& entry : file.entries()) {
    if (entry.name.starts_with("tiles.") && entry.name.ends_with(".in"))
      sets.push_back(entry.name.substr(0, entry.name.size() - 3));
  }
  ASSERT_EQ(sets.size(), 14u);
  for (const std::string& set : sets) {
    const Codebook codebook = *codec::codebook_from_name(set.substr(6, set.find('.', 6) - 6));
    const std::vector<float> in = codec::golden::floats(file, set + ".in");
    const std::vector<uint16_t> states = codec::golden::values<uint16_t>(file, set + ".states");
    TileSearch search({codebook, 2 * (set.back() - '0'), true, GetParam()});
    const size_t stride = GetParam() == SearchTier::kPortable ? 5 : 1;  // the portable tier takes 70 ms a tile
    for (size_t t = 0; t < in.size() / kTileSize; t += stride) {
      uint16_t mine[kTileSize];
      search.run(in.data() + t * kTileSize, mine);
      EXPECT_TRUE(std::equal(mine, mine + kTileSize, states.begin() + static_cast<long>(t * kTileSize)))
          << set << " tile " << t;
    }
  }
}

// Section 4.2's half-bit search in the plainest form, costs rounded by the definition.
void plain_half_step_search(const float* tile, int k2, Codebook codebook, uint16_t* states) {
  const float* values = codec::codebook_table_f32(codebook);
  const auto bits = [k2](int p) { return (p % 2) == 0 ? k2 / 2 : k2 / 2 + 1; };
  std::vector<std::vector<int>> back(kTileSize);
  std::vector<double> costs;
  const auto forward = [&](int roll, int start) {
    costs.assign(65536, start < 0 ? 0.0 : std::numeric_limits<double>::infinity());
    if (start >= 0) costs[static_cast<size_t>(start)] = 0;
    for (int i = 0; i < kTileSize; ++i) {
      const int p = (i + roll) % kTileSize;
      const int after = 16 - bits((p + 1) % kTileSize);
      std::vector<double> next(size_t{1} << after, std::numeric_limits<double>::infinity());
      back[static_cast<size_t>(p)].assign(size_t{1} << after, 0);
      for (int s = 0; s < 65536; ++s) {  // ascending states: ascending q for each out-node
        const size_t e = static_cast<size_t>(s & ((1 << after) - 1));
        const double d = codec::upstream::round_f16(double{values[s]} - round_f16(tile[p]));
        const double sum = costs[static_cast<size_t>(s >> bits(p))] + d * d;
        const double cost = sum < 65520 ? codec::upstream::round_f16(sum) : std::numeric_limits<double>::infinity();
        if (cost < next[e]) {
          next[e] = cost;
          back[static_cast<size_t>(p)][e] = s >> bits(p);
        }
      }
      costs = std::move(next);
    }
  };
  forward(128, -1);
  const auto rank = [](uint32_t e) {
    return std::tuple(codec::upstream::reverse5((e & 1023) >> 5), codec::upstream::reverse5(e & 31), e >> 10);
  };
  int node = 0;
  for (size_t e = 1; e < costs.size(); ++e) {
    const double best = costs[static_cast<size_t>(node)];
    if (costs[e] < best || (costs[e] == best && rank(static_cast<uint32_t>(e)) < rank(static_cast<uint32_t>(node)))) {
      node = static_cast<int>(e);
    }
  }
  for (int p = 127; p >= 0; --p) node = back[static_cast<size_t>(p)][static_cast<size_t>(node)];
  forward(0, node);
  for (int p = kTileSize - 1; p >= 0; --p) {
    const int previous = back[static_cast<size_t>(p)][static_cast<size_t>(node)];
    states[p] = static_cast<uint16_t>((previous << bits(p)) | node);
    node = previous;
  }
}

TEST_P(PeerSearch, half_bit_widths_equal_the_plain_search) {
  for (const int k2 : {3, 5, 7}) {
    const CounterRng rng(7, "half");
    float tile[kTileSize];
    for (uint64_t p = 0; p < kTileSize; ++p) tile[p] = gaussian(rng, p);
    uint16_t plain[kTileSize], mine[kTileSize];
    plain_half_step_search(tile, k2, Codebook::kMul1, plain);
    TileSearch({Codebook::kMul1, k2, false, GetParam()}).run(tile, mine);
    EXPECT_TRUE(std::equal(plain, plain + kTileSize, mine)) << k2 << " half bits";
    EXPECT_TRUE(codec::is_ring(mine, k2)) << k2 << " half bits";
  }
}

TEST_P(PeerSearch, awkward_tiles_equal_the_plain_restatement) {
  const CounterRng rng(9, "awkward");
  std::vector<std::vector<float>> tiles(5, std::vector<float>(kTileSize));
  for (size_t p = 0; p < kTileSize; ++p) {
    tiles[0][p] = 8 * gaussian(rng, p);                             // costs near the end of fp16's range
    tiles[1][p] = 1e-6f * gaussian(rng, p);                         // squares that vanish
    tiles[2][p] = p % 2 == 0 ? 100.0f : -100.0f;                    // costs that overflow to infinity
    tiles[3][p] = std::ldexp(1.0f, static_cast<int>(p % 24) - 20);  // ties and subnormals
    tiles[4][p] = p == 40 ? 199.0f : 0.5f * gaussian(rng, 1000 + p);
  }
  for (size_t t = 0; t < tiles.size(); ++t) {
    const int width = t % 2 == 0 ? 4 : 2;
    const Codebook codebook = t < 3 ? Codebook::kMul1 : Codebook::k3Inst;
    uint16_t expected[kTileSize], mine[kTileSize];
    codec::upstream::Search(width, codebook).run(tiles[t].data(), true, expected);
    TileSearch({codebook, 2 * width, true, GetParam()}).run(tiles[t].data(), mine);
    EXPECT_TRUE(std::equal(expected, expected + kTileSize, mine)) << "K = " << width << " tile " << t;
  }
}

INSTANTIATE_TEST_SUITE_P(Tiers, PeerSearch, testing::ValuesIn(usable_search_tiers()),
                         [](const auto& info) {
                           return info.param == SearchTier::kFp16     ? "fp16"
                                  : info.param == SearchTier::kAvx512 ? "avx512"
                                                                      : "portable";
                         });

}  // namespace
}  // namespace espalier::peer
