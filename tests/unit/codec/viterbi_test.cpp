#include "codec/viterbi.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/unit/codec/gaussian.h"
#include "bench/peer/golden_cases.h"
#include "tests/unit/codec/vectors.h"

namespace espalier::codec {
namespace {

constexpr int kWidths[] = {2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16};  // k2, all that exist

std::vector<uint16_t> search_all(const std::vector<float>& tiles, const SearchOptions& options, int n_threads = 1) {
  ThreadPool pool(n_threads);
  std::vector<uint16_t> states(tiles.size());
  search_tiles(pool, tiles.data(), static_cast<int64_t>(tiles.size()) / kTileSize, options, states.data());
  return states;
}

double mean_error(const std::vector<float>& tiles, const std::vector<uint16_t>& states, Codebook codebook) {
  double sum = 0;
  for (size_t t = 0; t < tiles.size(); t += kTileSize) sum += tile_error(tiles.data() + t, states.data() + t, codebook);
  return sum / static_cast<double>(tiles.size());
}

// Tiles that leave the usual path: zeros, constants, a ramp, values outside every codebook, one huge outlier.
std::vector<float> odd_tiles() {
  std::vector<float> tiles = gaussian::tiles(2, 1.0, 4);
  for (int p = 0; p < kTileSize; ++p) tiles[static_cast<size_t>(p)] *= 3;  // a third outside mul1's range
  const auto add = [&](auto value) {
    for (int p = 0; p < kTileSize; ++p) tiles.push_back(static_cast<float>(value(p)));
  };
  add([](int) { return 0.0; });
  add([](int) { return 1.0; });
  add([](int) { return -30.0; });
  add([](int p) { return -4.0 + p * 8.0 / 255.0; });
  add([](int p) { return p == 100 ? 1000.0 : 0.3 * std::sin(p * 12.9898); });
  add([](int p) { return 1e-6 * p; });
  return tiles;
}

// Whole searches; that single steps are equal, extremes included, is viterbi_steps_test.cpp. A Gaussian tile, a ramp, an outlier.
TEST(TileSearch, every_tier_finds_the_same_states_at_every_width) {
  std::vector<float> tiles = gaussian::tiles(1, 0.95, 1);
  const std::vector<float> odd = odd_tiles();
  tiles.insert(tiles.end(), odd.begin() + 5 * kTileSize, odd.begin() + 7 * kTileSize);
  for (int k2 : kWidths) {
    for (Codebook codebook : {Codebook::k3Inst, Codebook::kMcg, Codebook::kMul1}) {
      if (codebook != Codebook::kMul1 && k2 != 4 && k2 != 8 && k2 != 12) continue;  // the tables differ, not the loops
      for (CostKind costs : {CostKind::kAuto, CostKind::kFloat}) {
        SearchOptions options;
        options.codebook = codebook;
        options.k2 = k2;
        options.costs = costs;
        options.tier = SimdTier::kReference;
        const std::vector<uint16_t> expected = search_all(tiles, options, 2);
        for (SimdTier tier : usable_simd_tiers()) {
          options.tier = tier;
          EXPECT_EQ(search_all(tiles, options, 2), expected)
              << simd_tier_name(tier) << " K = " << width_text(k2) << " " << codebook_name(codebook) << " costs " << static_cast<int>(costs);
        }
      }
    }
  }
}

TEST(TileSearch, states_form_a_ring_that_packs_and_unpacks) {
  const std::vector<float> tiles = odd_tiles();
  for (int k2 : kWidths) {
    SearchOptions options;
    options.k2 = k2;
    const std::vector<uint16_t> states = search_all(tiles, options);
    for (size_t t = 0; t < states.size(); t += kTileSize) {
      EXPECT_TRUE(is_ring(states.data() + t, options.k2)) << "K = " << width_text(k2) << " tile " << t / kTileSize;
      std::vector<uint16_t> packed(static_cast<size_t>(tile_words(options.k2)));
      uint16_t back[kTileSize];
      pack_tile(states.data() + t, options.k2, packed.data());
      unpack_tile(packed.data(), options.k2, back);
      EXPECT_TRUE(std::equal(back, back + kTileSize, states.begin() + static_cast<long>(t)));
    }
  }
}

TEST(TileSearch, threads_and_batches_do_not_change_a_tile) {
  const std::vector<float> tiles = gaussian::tiles(9, 0.95, 2);
  SearchOptions options;
  const std::vector<uint16_t> expected = search_all(tiles, options, 1);
  EXPECT_EQ(search_all(tiles, options, 2), expected);
  EXPECT_EQ(search_all(tiles, options, 3), expected);
  for (size_t t = 0; t < tiles.size(); t += kTileSize) {
    uint16_t alone[kTileSize];
    search_tile(tiles.data() + t, options, alone);
    EXPECT_TRUE(std::equal(alone, alone + kTileSize, expected.begin() + static_cast<long>(t))) << t / kTileSize;
  }
}

// Sets of 16 tiles, odd ones included. One cut wins on average and loses no set by more than chance (a single tile's boundary); two
// cuts win every set.
TEST(TileSearch, golden_tile_sets_are_matched_at_least_as_well_as_exllamav3_on_average) {
  const SafetensorsFile file = golden::open(golden::tree_file("codebooks_tiles.safetensors"));
  double log_ratio = 0;
  int n_sets = 0;
  for (const TensorEntry& entry : file.entries()) {
    if (!entry.name.starts_with("tiles.") || !entry.name.ends_with(".in")) continue;
    const std::string set = entry.name.substr(0, entry.name.size() - 3);
    const size_t dot = set.find('.', 6);
    SearchOptions options;
    options.codebook = *codebook_from_name(set.substr(6, dot - 6));
    options.k2 = 2 * (set.back() - '0');
    const std::vector<float> tiles = golden::floats(file, entry.name);
    const std::vector<float> recorded = golden::floats(file, set + ".mse");
    const double theirs = std::accumulate(recorded.begin(), recorded.end(), 0.0) / static_cast<double>(recorded.size());
    const double ours = mean_error(tiles, search_all(tiles, options, 2), options.codebook);
    EXPECT_LE(ours, theirs * 1.001) << set;
    log_ratio += std::log(ours / theirs);
    options.n_cuts = 2;
    EXPECT_LE(mean_error(tiles, search_all(tiles, options, 2), options.codebook), theirs) << set;
    ++n_sets;
  }
  EXPECT_EQ(n_sets, 14);
  EXPECT_LT(log_ratio, 0.0);
}

TEST(TileSearch, fp32_costs_reach_the_published_exact_errors) {
  for (const vectors::SearchVector& v : vectors::kSearchVectors) {
    SearchOptions options;
    options.codebook = static_cast<Codebook>(v.codebook);
    options.k2 = 2 * v.width;
    options.costs = CostKind::kFloat;
    float tile[kTileSize];
    for (uint32_t p = 0; p < kTileSize; ++p) {
      tile[p] = vectors::search_input(p) * (options.codebook == Codebook::kMul1 ? 1.0f : 1.25f);
    }
    uint16_t states[kTileSize];
    search_tile(tile, options, states);
    EXPECT_NEAR(tile_error(tile, states, options.codebook), v.error_exact, 2e-6) << "K = " << v.width << " codebook " << v.codebook;
  }
}

// The definition in fp64, with back-pointers and no other trick. At half-integer widths node sets shrink and grow in turn.
double plain_search_error(const float* tile, int k2, Codebook codebook) {
  const float* values = codebook_table_f32(codebook);
  std::vector<std::vector<uint16_t>> back(kTileSize);
  const auto forward = [&](int roll, int start) {
    std::vector<double> before(65536u >> step_bits(k2, roll), start < 0 ? 0.0 : 1e300);
    if (start >= 0) before[static_cast<size_t>(start)] = 0;
    for (int i = 0; i < kTileSize; ++i) {
      const int p = (i + roll) % kTileSize;
      const int in_bits = step_bits(k2, p);
      const int out_bits = step_bits(k2, (p + 1) % kTileSize);
      std::vector<double> after(65536u >> out_bits, 1e301);
      back[static_cast<size_t>(p)].assign(after.size(), 0);
      for (int s = 0; s < kNStates; ++s) {
        const size_t e = static_cast<size_t>(s) % after.size();
        const double d = double{values[s]} - double{tile[p]};
        const double cost = before[static_cast<size_t>(s >> in_bits)] + d * d;
        if (cost < after[e]) {
          after[e] = cost;
          back[static_cast<size_t>(p)][e] = static_cast<uint16_t>(s >> in_bits);
        }
      }
      before = after;
    }
    return before;
  };
  const std::vector<double> free = forward(128, -1);
  size_t node = static_cast<size_t>(std::min_element(free.begin(), free.end()) - free.begin());
  for (int p = 127; p >= 0; --p) node = back[static_cast<size_t>(p)][node];
  return forward(0, static_cast<int>(node))[node];
}

TEST(TileSearch, fp32_costs_find_what_a_plain_search_finds) {
  const std::vector<float> tile = gaussian::tiles(1, 0.95, 9);
  ThreadPool pool(2);
  pool.parallel_for(std::size(kWidths), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      SearchOptions options;
      options.k2 = kWidths[i];
      options.costs = CostKind::kFloat;
      uint16_t states[kTileSize];
      search_tile(tile.data(), options, states);
      const double plain = plain_search_error(tile.data(), options.k2, options.codebook);
      // 512 fp32 additions of errors that are themselves rounded: at most 256 * 2^-23 of the sum, by which near ties may be swapped.
      EXPECT_NEAR(tile_error(tile.data(), states, options.codebook), plain, plain * 256 * 0x1p-23) << width_text(options.k2);
    }
  });
}

TEST(TileSearch, more_cuts_never_cost_error) {
  const std::vector<float> tiles = gaussian::tiles(24, 0.95, 7);
  for (int k2 : {3, 5, 6, 7}) {
    SearchOptions options;
    options.k2 = k2;
    double before = mean_error(tiles, search_all(tiles, options), options.codebook);
    const double one_cut = before;
    for (int n_cuts : {2, 4}) {
      options.n_cuts = n_cuts;
      const std::vector<uint16_t> states = search_all(tiles, options);
      for (size_t t = 0; t < states.size(); t += kTileSize) EXPECT_TRUE(is_ring(states.data() + t, options.k2));
      const double error = mean_error(tiles, states, options.codebook);
      EXPECT_LE(error, before) << n_cuts;
      before = error;
    }
    EXPECT_LT(before, one_cut) << "K = " << width_text(k2);
  }
}

}  // namespace
}  // namespace espalier::codec
