#include "codec/codebook.h"

#include <gtest/gtest.h>

#include "bench/peer/golden_cases.h"
#include "tests/unit/codec/vectors.h"

namespace espalier::codec {
namespace {

constexpr Codebook kAll[] = {Codebook::k3Inst, Codebook::kMcg, Codebook::kMul1};

TEST(Codebook, worked_states_match) {
  for (const vectors::WorkedState& w : vectors::kWorkedStates) {
    for (Codebook c : kAll) {
      EXPECT_EQ(codebook_value_f16(c, w.state), w.f16[static_cast<int>(c)]) << codebook_name(c) << " state " << w.state;
    }
  }
}

TEST(Codebook, tables_equal_those_of_exllamav3) {
  const SafetensorsFile file = golden::open(golden::tree_file("codebooks_tiles.safetensors"));
  for (Codebook c : kAll) {
    const std::vector<uint16_t> expected = golden::values<uint16_t>(file, "codebook." + std::string(codebook_name(c)));
    ASSERT_EQ(expected.size(), size_t{kNStates});
    for (int s = 0; s < kNStates; ++s) {
      ASSERT_EQ(codebook_table_f16(c)[s], expected[static_cast<size_t>(s)]) << codebook_name(c) << " state " << s;
      ASSERT_EQ(codebook_table_f32(c)[s], decode_f16(expected[static_cast<size_t>(s)])) << codebook_name(c) << " state " << s;
    }
  }
}

TEST(Codebook, names_round_trip_and_others_are_unknown) {
  for (Codebook c : kAll) EXPECT_EQ(codebook_from_name(codebook_name(c)), c);
  EXPECT_FALSE(codebook_from_name("MUL1").has_value());
  EXPECT_FALSE(codebook_from_name("").has_value());
}

}  // namespace
}  // namespace espalier::codec
