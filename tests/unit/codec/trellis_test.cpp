#include "codec/trellis.h"

#include <gtest/gtest.h>

#include "base/rng.h"
#include "bench/peer/golden_cases.h"

namespace espalier::codec {
namespace {

std::vector<uint16_t> random_tile(int k2, uint64_t seed) {
  const CounterRng rng(seed, "tile");
  std::vector<uint16_t> tile(static_cast<size_t>(tile_words(k2)));
  for (size_t i = 0; i < tile.size(); ++i) tile[i] = static_cast<uint16_t>(rng.bits(i));
  return tile;
}

TEST(Trellis, a_changed_state_is_no_ring) {
  for (int k2 : {2, 6, 7, 14}) {  // at K = 8 every state has 8 bits of its own, still shared with the next position
    uint16_t states[kTileSize];
    unpack_tile(random_tile(k2, 3).data(), k2, states);
    states[77] = static_cast<uint16_t>(states[77] ^ 1u);
    EXPECT_FALSE(is_ring(states, k2)) << width_text(k2);
  }
}

TEST(Trellis, permutation_is_the_tensor_core_order) {
  const SafetensorsFile file = golden::open(golden::tree_file("codebooks_tiles.safetensors"));
  const std::vector<int32_t> expected = golden::values<int32_t>(file, "tensor_core_perm");
  for (int p = 0; p < kTileSize; ++p) {
    ASSERT_EQ(ring_to_row_major()[p], expected[static_cast<size_t>(p)]) << p;
    ASSERT_EQ(row_major_to_ring()[ring_to_row_major()[p]], p);
  }
}

TEST(Trellis, golden_tiles_unpack_to_the_recorded_states) {
  const SafetensorsFile file = golden::open(golden::tree_file("mul1_128.safetensors"));
  int n_checked = 0;
  for (const std::string& name : golden::linears(file)) {
    if (file.find(name + ".enc") == nullptr) continue;
    const Exl3Tensor tensor = golden::load(file, name);
    std::vector<uint16_t> states(static_cast<size_t>(tensor.k * tensor.n));
    unpack_states(tensor.view().trellis, states.data());
    EXPECT_EQ(states, golden::values<uint16_t>(file, name + ".enc")) << name;
    ++n_checked;
  }
  EXPECT_EQ(n_checked, 5);
}

TEST(Trellis, golden_tile_sets_pack_to_the_recorded_words) {
  const SafetensorsFile file = golden::open(golden::tree_file("codebooks_tiles.safetensors"));
  int n_sets = 0;
  for (const TensorEntry& entry : file.entries()) {
    if (!entry.name.starts_with("tiles.") || !entry.name.ends_with(".states")) continue;
    const std::string set = entry.name.substr(0, entry.name.size() - 7);
    const std::vector<uint16_t> states = golden::values<uint16_t>(file, entry.name);
    const std::vector<uint16_t> packed = golden::values<uint16_t>(file, set + ".packed");
    const int64_t n_tiles = entry.shape[0];
    const int k2 = static_cast<int>(packed.size() / static_cast<size_t>(n_tiles) / 8);
    std::vector<uint16_t> mine(packed.size());
    for (int64_t t = 0; t < n_tiles; ++t) pack_tile(states.data() + t * kTileSize, k2, mine.data() + t * tile_words(k2));
    EXPECT_EQ(mine, packed) << set;
    ++n_sets;
  }
  EXPECT_EQ(n_sets, 14);
}

TEST(Trellis, widths_are_read_from_bits_and_others_refused) {
  EXPECT_EQ(width_from_bits(3).value(), 6);
  EXPECT_EQ(width_from_bits(2.5).value(), 5);
  EXPECT_EQ(width_from_bits(8).value(), 16);
  for (double bits : {0.0, 0.5, 4.5, 7.5, 9.0, 2.25, -3.0, 1e300, std::numeric_limits<double>::quiet_NaN()}) {
    const Result<int> r = width_from_bits(bits);
    ASSERT_FALSE(r.ok()) << bits;
    EXPECT_EQ(r.error().code(), StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace espalier::codec
