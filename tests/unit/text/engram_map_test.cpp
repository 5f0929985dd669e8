#include "text/engram_map.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "format/safetensors.h"
#include "unit/text/test_tokenizer.h"

namespace espalier {
namespace {

TEST(EngramMap, equals_the_map_recorded_from_the_vendors_code) {
  const std::string golden = ESPALIER_SOURCE_DIR "/tests/golden/model/";
  const auto file = SafetensorsFile::open(golden + "tiny-a-ref/common.safetensors").value();
  const TensorEntry* entry = file.find("engram.token_map");
  ASSERT_NE(entry, nullptr);
  const int64_t* want = file.view(*entry).as<int64_t>().data();
  const Tokenizer tokenizer = Tokenizer::open(golden + "tiny-a").value();
  const EngramMap map = build_engram_map(tokenizer).value();
  EXPECT_EQ(map.n_classes, 441);
  ASSERT_EQ(entry->size_bytes(), map.class_of.size() * sizeof(int64_t));
  for (size_t i = 0; i < map.class_of.size(); ++i) {
    EXPECT_EQ(map.class_of[i], want[i]) << "token " << i;
  }
}

TEST(EngramMap, classes_are_numbered_by_first_appearance) {
  const Tokenizer tokenizer = testing::small_tokenizer();
  const EngramMap map = build_engram_map(tokenizer).value();
  int32_t seen = 0;
  for (const int32_t c : map.class_of) {
    ASSERT_LE(c, seen);
    seen = std::max(seen, c + 1);
  }
  EXPECT_EQ(seen, map.n_classes);
  EXPECT_EQ(map.class_of['A'], map.class_of['a']);
  EXPECT_EQ(map.class_of['\t'], map.class_of[' ']);
  EXPECT_NE(map.class_of[0x80], map.class_of[0x81]);  // lone bytes keep their own spelling
}

TEST(EngramMap, normalisation_follows_the_reference) {
  const auto n = [](std::string_view text) { return normalize_for_engram(text).value(); };
  EXPECT_EQ(n("  Thé  FOX\t\n"), "the fox");
  EXPECT_EQ(n(" \t\r\n"), " ");          // one space survives the strip
  EXPECT_EQ(n("\u00A0"), " ");           // a no-break space is a space after NFKC
  EXPECT_EQ(n("\u2028"), "");            // a line separator is stripped, and not a run of spaces
  EXPECT_EQ(n("ＡＢＣ①ﬁ"), "abc1fi");    // compatibility forms
  EXPECT_EQ(n("İSTANBUL"), "istanbul");  // the dot is a mark after NFD
  EXPECT_EQ(n("ΣΑΣ"), "σασ");            // lower case letter by letter: no final sigma
  EXPECT_EQ(n("\u0301"), "");
  EXPECT_EQ(n("का"), "क");           // spacing marks go too
  EXPECT_EQ(n("\u07FD"), "\u07FD");  // a mark of Unicode 11 is unknown to the reference, so it stays
  EXPECT_EQ(n("각"), "\u1100\u1161\u11A8");
  EXPECT_EQ(n("\uE000a"), " a");
  EXPECT_EQ(n("\u32FF"), "\u32FF");          // the era sign of Unicode 12.1 has no decomposition there
  EXPECT_EQ(n("\U00010D50"), "\U00010D70");  // lower case of Unicode 16
}

}  // namespace
}  // namespace espalier
