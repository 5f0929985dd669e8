// That our restatement of exllamav3's search is faithful: then comparing our search with it means something.
#include "tests/unit/codec/upstream_search.h"

#include <gtest/gtest.h>

#include "codec/viterbi.h"
#include "bench/peer/golden_cases.h"
#include "tests/unit/codec/vectors.h"

namespace espalier::codec {
namespace {

TEST(UpstreamSearch, published_vectors_come_out_bit_for_bit) {
  constexpr int64_t n_vectors = std::size(vectors::kSearchVectors);
  ThreadPool pool(2);
  pool.parallel_for(n_vectors, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const vectors::SearchVector& v = vectors::kSearchVectors[i];
      const Codebook codebook = static_cast<Codebook>(v.codebook);
      float tile[kTileSize];
      for (uint32_t p = 0; p < kTileSize; ++p) {
        tile[p] = vectors::search_input(p) * (codebook == Codebook::kMul1 ? 1.0f : 1.25f);
      }
      upstream::Search search(v.width, codebook);
      uint16_t states[kTileSize];
      search.run(tile, true, states);
      for (int p = 0; p < 4; ++p) EXPECT_EQ(states[p], v.first_states[p]) << "K = " << v.width << " codebook " << v.codebook;
      EXPECT_EQ(vectors::crc32(states, sizeof states), v.crc_states) << "K = " << v.width << " codebook " << v.codebook;
      EXPECT_NEAR(tile_error(tile, states, codebook), v.error, 1e-6 * v.error + 1e-6);
      std::vector<uint16_t> packed(static_cast<size_t>(tile_words(2 * v.width)));
      pack_tile(states, 2 * v.width, packed.data());
      EXPECT_EQ(vectors::crc32(packed.data(), packed.size() * 2), v.crc_packed) << "K = " << v.width;
      search.run(tile, false, states);
      EXPECT_EQ(vectors::crc32(states, sizeof states), v.crc_fixed) << "K = " << v.width << " codebook " << v.codebook;
      EXPECT_NEAR(tile_error(tile, states, codebook), v.error_fixed, 1e-6 * v.error_fixed + 1e-6);
    }
  });
}

TEST(UpstreamSearch, golden_tile_sets_come_out_bit_for_bit) {
  const SafetensorsFile file = golden::open(golden::tree_file("codebooks_tiles.safetensors"));
  std::vector<std::string> sets;
  for (const TensorEntry& entry : file.entries()) {
    if (entry.name.starts_with("tiles.") && entry.name.ends_with(".in")) sets.push_back(entry.name.substr(0, entry.name.size() - 3));
  }
  ASSERT_EQ(sets.size(), 14u);
  ThreadPool pool(2);
  pool.parallel_for(static_cast<int64_t>(sets.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const std::string& set = sets[static_cast<size_t>(i)];
      const size_t dot = set.find('.', 6);
      const Codebook codebook = *codebook_from_name(set.substr(6, dot - 6));
      const std::vector<float> in = golden::floats(file, set + ".in");
      const std::vector<uint16_t> states = golden::values<uint16_t>(file, set + ".states");
      upstream::Search search(set.back() - '0', codebook);
      for (size_t t = 0; t < in.size() / kTileSize; ++t) {
        uint16_t mine[kTileSize];
        search.run(in.data() + t * kTileSize, true, mine);
        EXPECT_TRUE(std::equal(mine, mine + kTileSize, states.begin() + static_cast<long>(t * kTileSize))) << set << " tile " << t;
      }
    }
  });
}

}  // namespace
}  // namespace espalier::codec
