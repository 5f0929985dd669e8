// The device layout and the lanes' window extraction, on the CPU: a warp is a loop over 32 lanes.
#include "codec/cuda/windows.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <vector>

#include "base/rng.h"

namespace espalier::codec::cuda {
namespace {

struct Block {
  std::vector<uint32_t> tiles[2][4];
  uint16_t states[2][4][kTileSize];
};

Block random_block(int k2) {
  const CounterRng rng(3, "block " + std::to_string(k2));
  Block b;
  for (int h = 0; h < 2; ++h) {
    for (int nt = 0; nt < 4; ++nt) {
      for (int i = 0; i < 4 * k2; ++i) b.tiles[h][nt].push_back(static_cast<uint32_t>(rng.bits(static_cast<uint64_t>(1000 * h + 100 * nt + i))));
      unpack_tile(reinterpret_cast<const uint16_t*>(b.tiles[h][nt].data()), k2, b.states[h][nt]);
    }
  }
  return b;
}

// unpack_tile has its own vectors and golden files; every state that a lane extracts must be the one it says.
template <int k2>
void expect_lanes_find_their_states() {
  const Block block = random_block(k2);
  uint32_t words[32][k2];
  for (int lane = 0; lane < 32; ++lane) {
    for (int w = 0; w < k2; ++w) words[lane][w] = layout_word(k2, lane, w, [&](int h, int nt) { return block.tiles[h][nt].data(); });
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int nt = 0; nt < 4; ++nt) {
      uint32_t s[string_words(k2)];
      bit_string<k2>(words[lane], pack_ends<k2>(words[ring_neighbour(lane)], nt / 2), nt % 2 != 0, nt, s);
      uint32_t same[string_words(k2)];
      bit_string<k2>(words[lane], last_word<k2>(words[ring_neighbour(lane)], nt), false, nt, same);
      for (int i = 0; i < kPositions; ++i) {
        EXPECT_EQ(window<k2>(same, i), window<k2>(s, i));
        EXPECT_EQ(window<k2>(s, i), block.states[lane_half(lane)][nt][kPositions * lane_unit(lane) + i])
            << "K = " << width_text(k2) << " lane " << lane << " n-tile " << nt << " position " << i;
      }
    }
  }
}

TEST(DeviceLayout, every_lane_finds_its_states_at_every_width) {
  expect_lanes_find_their_states<2>();
  expect_lanes_find_their_states<3>();
  expect_lanes_find_their_states<4>();
  expect_lanes_find_their_states<5>();
  expect_lanes_find_their_states<6>();
  expect_lanes_find_their_states<7>();
  expect_lanes_find_their_states<8>();
  expect_lanes_find_their_states<10>();
  expect_lanes_find_their_states<12>();
  expect_lanes_find_their_states<14>();
  expect_lanes_find_their_states<16>();
}

TEST(DeviceLayout, words_of_a_block_have_places_of_their_own) {
  for (int k2 = 2; k2 <= 16; ++k2) {
    if (!is_width(k2)) continue;
    std::set<int> places;
    for (int lane = 0; lane < 32; ++lane) {
      for (int w = 0; w < k2; ++w) places.insert(word_place(k2, lane, w));
    }
    EXPECT_EQ(places.size(), static_cast<size_t>(block_words(k2)));
    EXPECT_EQ(*places.begin(), 0);
    EXPECT_EQ(*places.rbegin(), block_words(k2) - 1);
  }
}

// Ring position 16u + i of lane l against the published permutation: the rows and columns that the kernels count on.
TEST(DeviceLayout, a_lane_owns_two_columns_and_eight_rows) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < kPositions; ++i) {
      const int element = ring_to_row_major()[kPositions * lane_unit(lane) + i];
      const int row = 4 * (lane % 2) + 2 * (i / 8) + (i & 1) + 8 * (i >> 1 & 1);
      EXPECT_EQ(element / 16, row) << "lane " << lane << " position " << i;
      EXPECT_EQ(element % 16, lane / 4 + 8 * (i >> 2 & 1)) << "lane " << lane << " position " << i;
    }
  }
}

}  // namespace
}  // namespace espalier::codec::cuda
