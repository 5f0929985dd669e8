// The trellis search on a GPU against the CPU search, state by state. The oracle is the CPU's search, which has oracles
// of its own (exhaustive search and exllamav3's rules in tests/unit/codec).
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "base/rng.h"
#include "codec/cuda/viterbi.h"
#include "codec/weight_scales.h"

namespace espalier::codec {
namespace {

double gaussian(const CounterRng& rng, uint64_t i) {
  return std::sqrt(-2 * std::log(1 - rng.uniform(2 * i))) * std::cos(6.283185307179586 * rng.uniform(2 * i + 1));
}

// Gaussian tiles at the width's spread, and tiles at which integer costs wrap, are clamped, saturate or give up.
std::vector<float> test_tiles(Codebook codebook, int k2, int n_gaussian) {
  const double spread = best_spread(codebook, k2);
  const CounterRng rng(static_cast<uint64_t>(k2), "tiles");
  std::vector<float> tiles;
  uint64_t n = 0;
  const auto normal = [&] { return gaussian(rng, n++) * spread; };
  const auto add = [&](auto value) {
    for (int p = 0; p < kTileSize; ++p) tiles.push_back(static_cast<float>(value(p)));
  };
  for (int t = 0; t < n_gaussian; ++t) add([&](int) { return normal(); });
  for (double factor : {1.3, 1.6, 3.0}) add([&](int) { return factor * normal(); });
  add([](int p) { return -4.0 + p * 8.0 / 255.0; });
  add([](int p) { return p == 100 ? 1000.0 : 0.3 * std::sin(p * 12.9898); });
  add([](int) { return 0.0; });
  add([](int) { return 1.0; });
  add([](int) { return -30.0; });
  add([](int p) { return 1e-6 * p; });
  add([](int p) { return p % 2 != 0 ? 3.9 : -3.9; });
  add([](int p) { return p % 7 == 0 ? 3.2 : -0.5; });
  add([&](int p) { return p % 50 == 0 ? -2.7 : 0.5 * normal(); });
  add([&](int p) { return p % 16 == 3 ? 3.99 : normal(); });
  return tiles;
}

void expect_equal(const DeviceSearchOptions& options, int n_gaussian) {
  SCOPED_TRACE(std::to_string(options.search.k2) + " half bits, " +
               std::string(codebook_name(options.search.codebook)));
  Result<device::Stream> stream = device::Stream::create(0);
  ASSERT_TRUE(stream.ok()) << stream.error().message();
  const std::vector<float> tiles = test_tiles(options.search.codebook, options.search.k2, n_gaussian);
  std::vector<uint16_t> wanted(tiles.size());
  ThreadPool pool;
  search_tiles(pool, tiles.data(), static_cast<int64_t>(tiles.size()) / kTileSize, options.search, wanted.data());
  const Result<std::vector<uint16_t>> found = search_tiles_on_device(*stream, tiles, options);
  ASSERT_TRUE(found.ok()) << found.error().message();
  for (size_t i = 0; i < tiles.size(); i += kTileSize) {
    EXPECT_EQ(std::memcmp(wanted.data() + i, found->data() + i, kTileSize * sizeof(uint16_t)), 0)
        << "tile " << i / kTileSize;
  }
}

DeviceSearchOptions options_of(int k2, Codebook codebook = Codebook::kMul1) {
  DeviceSearchOptions options;
  options.search.k2 = k2;
  options.search.codebook = codebook;
  return options;
}

TEST(GpuSearch, every_width_finds_the_states_of_the_cpu) {
  for (int k2 : {2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16}) expect_equal(options_of(k2), 40);
}

TEST(GpuSearch, single_tiles_give_the_same_states_as_pairs) {
  for (int k2 : {4, 5, 6, 7, 8}) {
    DeviceSearchOptions options = options_of(k2);
    options.one_tile = true;
    expect_equal(options, 10);
  }
}

TEST(GpuSearch, every_codebook_finds_the_states_of_the_cpu) {
  for (Codebook codebook : {Codebook::k3Inst, Codebook::kMcg}) {
    for (int k2 : {2, 4, 6, 8, 10, 16}) expect_equal(options_of(k2, codebook), 8);
  }
}

TEST(GpuSearch, cuts_and_fp32_costs_find_the_states_of_the_cpu) {
  for (int k2 : {3, 6}) {
    DeviceSearchOptions options = options_of(k2);
    options.search.n_cuts = 4;
    expect_equal(options, 3);
    options.search.n_cuts = 1;
    options.search.costs = CostKind::kFloat;
    expect_equal(options, 3);
  }
}

}  // namespace
}  // namespace espalier::codec
