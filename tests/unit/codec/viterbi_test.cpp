#include "codec/viterbi.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/rng.h"
#include "tests/unit/codec/golden.h"
#include "tests/unit/codec/vectors.h"

namespace espalier::codec {
namespace {

// Inverse of the normal distribution function (Acklam's rational approximation, relative error 1e-9).
double normal_quantile(double p) {
  static constexpr double a[] = {-3.969683028665376e+01, 2.209460984245205e+02,  -2.759285104469687e+02,
                                 1.383577518672690e+02,  -3.066479806614716e+01, 2.506628277459239e+00};
  static constexpr double b[] = {-5.447609879822406e+01, 1.615858368580409e+02, -1.556989798598866e+02, 6.680131188771972e+01,
                                 -1.328068155288572e+01};
  static constexpr double c[] = {-7.784894002430293e-03, -3.223964580411365e-01, -2.400758277161838e+00,
                                 -2.549732539343734e+00, 4.374664141464968e+00,  2.938163982698783e+00};
  static constexpr double d[] = {7.784695709041462e-03, 3.224671290700398e-01, 2.445134137142996e+00, 3.754408661907416e+00};
  if (p > 0.5) return -normal_quantile(1 - p);
  if (p < 0.02425) {
    const double q = std::sqrt(-2 * std::log(p));
    return (((((c[0] * q + c[1]) * q + c[2]) * q + c[3]) * q + c[4]) * q + c[5]) /
           ((((d[0] * q + d[1]) * q + d[2]) * q + d[3]) * q + 1);
  }
  const double q = p - 0.5;
  const double r = q * q;
  return (((((a[0] * r + a[1]) * r + a[2]) * r + a[3]) * r + a[4]) * r + a[5]) * q /
         (((((b[0] * r + b[1]) * r + b[2]) * r + b[3]) * r + b[4]) * r + 1);
}

// Tiles whose values are the normal quantiles in random order: Gaussian without the sampling noise of rare large values.
std::vector<float> gaussian_tiles(int64_t n_tiles, double spread, uint64_t seed) {
  const int64_t size = n_tiles * kTileSize;
  std::vector<double> values(static_cast<size_t>(size));
  for (int64_t i = 0; i < size; ++i) {
    values[static_cast<size_t>(i)] = normal_quantile((static_cast<double>(i) + 0.5) / static_cast<double>(size)) * spread;
  }
  const CounterRng rng(seed, "order");
  for (int64_t i = size - 1; i > 0; --i) {
    std::swap(values[static_cast<size_t>(i)], values[static_cast<size_t>(rng.bits(static_cast<uint64_t>(i)) % static_cast<uint64_t>(i + 1))]);
  }
  return {values.begin(), values.end()};
}

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
  std::vector<float> tiles = gaussian_tiles(2, 1.0, 4);
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
  std::vector<float> tiles = gaussian_tiles(1, 0.95, 1);
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
  const std::vector<float> tiles = gaussian_tiles(9, 0.95, 2);
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

// Integer costs against fp32 costs on the same tiles; the bound is far below what any other choice changes.
TEST(TileSearch, integer_costs_lose_at_most_a_tenth_of_a_percent) {
  for (int k2 : kWidths) {
    for (Codebook codebook : {Codebook::kMcg, Codebook::kMul1}) {
      if (!is_searchable_width(k2, codebook)) continue;
      const std::vector<float> tiles = gaussian_tiles(48, codebook == Codebook::kMul1 ? 0.9 : 1.15, 3);
      SearchOptions options;
      options.codebook = codebook;
      options.k2 = k2;
      const double integer = mean_error(tiles, search_all(tiles, options, 2), codebook);
      options.costs = CostKind::kFloat;
      const double exact = mean_error(tiles, search_all(tiles, options, 2), codebook);
      EXPECT_LE(integer, exact * 1.001) << "K = " << width_text(k2) << " " << codebook_name(codebook);
    }
  }
}

struct Gate {
  Codebook codebook;
  int width;
  double spread, snr_db;  // docs/formats/exl3.md, "Measured quality"
};

// Published mean square errors on a Gaussian source (two passes, upstream's final node), which an exact search should not exceed.
// From K = 4 on values beyond the codebook's range matter as much as the search; the share of them in the published sample is not
// known, so here they are brought to the edge.
TEST(TileSearch, gaussian_error_is_within_half_a_percent_of_the_published_one) {
  constexpr Codebook mul1 = Codebook::kMul1, mcg = Codebook::kMcg, inst = Codebook::k3Inst;
  const Gate gates[] = {{mul1, 1, 1.1249, 5.639},  {mul1, 2, 0.9972, 11.652}, {mul1, 3, 0.9453, 17.605}, {mul1, 4, 0.9200, 23.534},
                        {mul1, 5, 0.9326, 29.390}, {mul1, 6, 0.9000, 35.216}, {mul1, 7, 0.8833, 40.865}, {mul1, 8, 0.8000, 46.829},
                        {mcg, 2, 1.2437, 11.646},  {mcg, 3, 1.1818, 17.597},  {mcg, 4, 1.1666, 23.453},  {inst, 2, 1.2450, 11.621},
                        {inst, 3, 1.1815, 17.510}, {inst, 4, 1.1518, 23.378}};
  for (const Gate& gate : gates) {
    const int64_t n_tiles = gate.width == 1 ? 128 : 256;
    std::vector<float> tiles = gaussian_tiles(n_tiles, gate.spread, 6);
    if (gate.width >= 4) {
      const float range = gate.codebook == mul1 ? 3.4f : 3.9f;
      for (float& v : tiles) v = std::clamp(v, -range, range);
    }
    SearchOptions options;
    options.codebook = gate.codebook;
    options.k2 = 2 * gate.width;
    const double error = mean_error(tiles, search_all(tiles, options, 2), gate.codebook) / (gate.spread * gate.spread);
    const double published = std::pow(10.0, -gate.snr_db / 10);
    EXPECT_LE(error, published * 1.005) << codebook_name(gate.codebook) << " K = " << gate.width << ": ratio " << error / published;
    EXPECT_GE(error, published * 0.93) << "better than the code allows: the measure is wrong";
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

// The definition in fp64, with back-pointers and no other trick: node sets shrink and grow in turn at half-integer widths.
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

TEST(TileSearch, fp32_costs_find_what_a_plain_search_finds_at_half_steps) {
  const std::vector<float> tiles = gaussian_tiles(2, 0.97, 9);
  for (int k2 : {3, 5, 6, 7}) {
    SearchOptions options;
    options.k2 = k2;
    options.costs = CostKind::kFloat;
    const std::vector<uint16_t> states = search_all(tiles, options);
    for (size_t t = 0; t < tiles.size(); t += kTileSize) {
      const double plain = plain_search_error(tiles.data() + t, k2, options.codebook);
      // 512 fp32 additions of errors that are themselves rounded: at most 256 * 2^-23 of the sum, by which near ties may be swapped.
      EXPECT_NEAR(tile_error(tiles.data() + t, states.data() + t, options.codebook), plain, plain * 256 * 0x1p-23) << width_text(k2);
    }
  }
}

TEST(TileSearch, more_cuts_never_cost_error) {
  const std::vector<float> tiles = gaussian_tiles(24, 0.95, 7);
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
