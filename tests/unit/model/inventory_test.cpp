#include "model/inventory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace espalier {
namespace {

namespace fs = std::filesystem;

constexpr const char* kTinyA = ESPALIER_GOLDEN_DIR "/model/tiny-a";

TEST(Inventory, counts_the_golden_checkpoint) {
  const auto r = take_inventory(kTinyA);
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_EQ(r->family, "official");
  EXPECT_EQ(r->n_tensors, 806);  // its README
  EXPECT_EQ(r->n_files, 8);
  EXPECT_EQ(r->n_exl3, 0);
  EXPECT_EQ(r->missing, std::vector<std::string>{});
  EXPECT_EQ(r->unexpected, std::vector<std::string>{});
  uint64_t sum = 0;
  for (const auto& [part, bytes] : r->bytes_by_part) sum += bytes;
  EXPECT_EQ(sum, r->bytes);
}

TEST(Inventory, names_what_a_smaller_config_does_not_expect) {
  const fs::path dir = fs::temp_directory_path() / ("espalier_inventory_" + std::to_string(::getpid()));
  fs::remove_all(dir);
  fs::create_directories(dir);
  for (const auto& item : fs::directory_iterator(kTinyA)) fs::create_symlink(fs::absolute(item.path()), dir / item.path().filename());
  std::ifstream in(std::string(kTinyA) + "/config.json");
  std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const std::string from = "\"n_routed_experts\": 8";
  ASSERT_NE(text.find(from), std::string::npos);
  text.replace(text.find(from), from.size(), "\"n_routed_experts\": 9");
  fs::remove(dir / "config.json");
  std::ofstream(dir / "config.json") << text;
  const auto r = take_inventory(dir.string());
  fs::remove_all(dir);
  ASSERT_TRUE(r.ok()) << r.error().message();
  ASSERT_EQ(r->missing.size(), 8u * 3u);  // one more expert of three matrices in each of eight layers
  EXPECT_EQ(r->missing.front(), "layers.0.ffn.experts.8.w1.weight");
}

}  // namespace
}  // namespace espalier
