// Each step of each tier against the definition in viterbi_steps.h and viterbi_cost.h, written out as one loop over states.
#include "codec/viterbi_steps.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "base/rng.h"
#include "codec/viterbi_cost.h"
#include "codec/viterbi_tables.h"

namespace espalier::codec {
namespace {

constexpr int kWidths[] = {2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16};

std::vector<SimdTier> all_tiers() {
  std::vector<SimdTier> tiers = usable_simd_tiers();
  tiers.push_back(SimdTier::kReference);
  return tiers;
}

// What may stand in front of a step: anything; costs of a usual size; only one node allowed.
template <typename T>
std::vector<AlignedArray<T>> cost_rows(int n_nodes, T most, T usual, T forbidden, const CounterRng& rng) {
  std::vector<AlignedArray<T>> rows(3);
  for (AlignedArray<T>& row : rows) row = AlignedArray<T>(static_cast<size_t>(n_nodes));
  for (int e = 0; e < n_nodes; ++e) {
    const uint64_t i = static_cast<uint64_t>(e);
    rows[0].data()[e] = static_cast<T>(rng.uniform(i) * static_cast<double>(most));
    rows[1].data()[e] = static_cast<T>(rng.uniform(i + 70000) * static_cast<double>(usual));
    rows[2].data()[e] = forbidden;
  }
  rows[2].data()[n_nodes / 3] = 0;
  return rows;
}

TEST(SearchSteps, integer_steps_equal_the_definition_in_every_tier) {
  const CounterRng rng(1, "steps");
  for (int k2 : kWidths) {
    for (Codebook codebook : {Codebook::kMul1, Codebook::k3Inst}) {
      if (codebook != Codebook::kMul1 && k2 != 6) continue;  // other codes, same loops
      for (int parity = 0; parity <= k2 % 2; ++parity) {
        const int in_bits = step_bits(k2, parity);
        const int out_bits = step_bits(k2, parity + 1);
        const int n_out = 65536 >> out_bits;
        const int16_t* codes = code_tables(codebook, k2, SimdTier::kReference).by_state16.data();
        // Usual targets, the ends, and those from which a code is exactly half the number range away: its difference is -32768.
        std::vector<int16_t> targets = {0, 4000, -9000, 32767, -32767};
        const int16_t low = *std::min_element(codes, codes + kNStates);
        targets.push_back(static_cast<int16_t>(std::min(low + 32768, 32767)));
        targets.push_back(static_cast<int16_t>(low));
        const auto rows = cost_rows<uint16_t>(65536 >> in_bits, 65535, 9000, 65535, rng);
        for (size_t r = 0; r < rows.size(); ++r) {
          for (int16_t w : targets) {
            const uint16_t* prev = rows[r].data();
            std::vector<uint16_t> expected(static_cast<size_t>(n_out), 65535);
            for (int s = 0; s < kNStates; ++s) {
              uint16_t& e = expected[static_cast<size_t>(s & (n_out - 1))];
              e = std::min(e, saturating_add(prev[s >> in_bits], integer_error(cost_rule(k2), codes[s], w)));
            }
            for (SimdTier tier : all_tiers()) {
              const CodeTables& tables = code_tables(codebook, k2, tier);
              AlignedArray<uint16_t> next(static_cast<size_t>(n_out));
              tables.kernels->step16[k2][parity](prev, next.data(), tables.ordered16[parity].data(), w);
              EXPECT_TRUE(std::equal(expected.begin(), expected.end(), next.data()))
                  << simd_tier_name(tier) << " K = " << width_text(k2) << " parity " << parity << " costs " << r << " target " << w;
            }
          }
        }
      }
    }
  }
}

TEST(SearchSteps, fp32_steps_equal_the_definition_in_every_tier) {
  const CounterRng rng(2, "steps");
  const float* codes = codebook_table_f32(Codebook::kMul1);
  for (int k2 : kWidths) {
    for (int parity = 0; parity <= k2 % 2; ++parity) {
      const int in_bits = step_bits(k2, parity);
      const int n_out = 65536 >> step_bits(k2, parity + 1);
      const float infinity = std::numeric_limits<float>::infinity();
      const auto rows = cost_rows<float>(65536 >> in_bits, 1e30f, 20.0f, infinity, rng);
      for (size_t r = 0; r < rows.size(); ++r) {
        for (float w : {0.0f, 0.7f, -3.4f, 1e10f}) {
          const float* prev = rows[r].data();
          std::vector<float> expected(static_cast<size_t>(n_out), infinity);
          for (int s = 0; s < kNStates; ++s) {
            float& e = expected[static_cast<size_t>(s & (n_out - 1))];
            e = std::min(e, prev[s >> in_bits] + float_error(codes[s], w));
          }
          for (SimdTier tier : all_tiers()) {
            const CodeTables& tables = code_tables(Codebook::kMul1, k2, tier);
            AlignedArray<float> next(static_cast<size_t>(n_out));
            tables.kernels->step32[k2][parity](prev, next.data(), tables.ordered32[parity].data(), w);
            EXPECT_TRUE(std::equal(expected.begin(), expected.end(), next.data()))
                << simd_tier_name(tier) << " K = " << width_text(k2) << " parity " << parity << " costs " << r << " target " << w;
          }
        }
      }
    }
  }
}

TEST(SearchSteps, the_minimum_is_subtracted_and_returned_in_every_tier) {
  const CounterRng rng(3, "steps");
  for (SimdTier tier : all_tiers()) {
    for (int size : {256, 512, 32768}) {
      AlignedArray<uint16_t> costs(static_cast<size_t>(size));
      for (int e = 0; e < size; ++e) costs.data()[e] = static_cast<uint16_t>(1000 + rng.bits(static_cast<uint64_t>(e)) % 64000);
      costs.data()[size - 1] = 777;
      const std::vector<uint16_t> before(costs.data(), costs.data() + size);
      EXPECT_EQ(code_tables(Codebook::kMul1, 6, tier).kernels->subtract_minimum16(costs.data(), size), 777);
      for (int e = 0; e < size; ++e) ASSERT_EQ(costs.data()[e], before[static_cast<size_t>(e)] - 777) << simd_tier_name(tier);
    }
  }
}

}  // namespace
}  // namespace espalier::codec
