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
  EXPECT_EQ(r->layout, Layout::kOfficial);
  EXPECT_EQ(r->n_tensors, 806);  // its README
  EXPECT_EQ(r->n_files, 8);
  EXPECT_EQ(r->n_exl3, 0);
  EXPECT_EQ(r->missing, std::vector<std::string>{});
  EXPECT_EQ(r->unexpected, std::vector<std::string>{});
  uint64_t sum = 0;
  for (const auto& [part, bytes] : r->bytes_by_part) sum += bytes;
  EXPECT_EQ(sum, r->bytes);
}

// A copy of the golden checkpoint by links, with another number of experts in its config.
class LinkedCopy : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::temp_directory_path() / ("espalier_inventory_" + std::to_string(::getpid()));
    fs::remove_all(dir_);
    fs::create_directories(dir_);
    for (const auto& item : fs::directory_iterator(kTinyA)) fs::create_symlink(fs::absolute(item.path()), dir_ / item.path().filename());
  }
  void TearDown() override { fs::remove_all(dir_); }
  fs::path dir_;
};

TEST_F(LinkedCopy, a_shard_that_is_nowhere_and_its_tensors_are_named) {
  const auto whole = take_inventory(dir_.string());
  ASSERT_TRUE(whole.ok()) << whole.error().message();
  fs::remove(dir_ / "model-00003-of-00008.safetensors");
  const auto r = take_inventory(dir_.string());
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_EQ(r->missing_files, std::vector<std::string>{"model-00003-of-00008.safetensors"});
  // All of it is missing but the image router biases, which may be absent and are noted.
  EXPECT_EQ(static_cast<int64_t>(r->missing.size() + r->notes.size()), whole->n_tensors - r->n_tensors);
  EXPECT_GT(r->missing.size(), 100u);
}

TEST_F(LinkedCopy, weights_of_another_config_are_refused_with_file_and_tensor) {
  std::ifstream in(std::string(kTinyA) + "/config.json");
  std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const std::string from = "\"n_routed_experts\": 8";
  ASSERT_NE(text.find(from), std::string::npos);
  text.replace(text.find(from), from.size(), "\"n_routed_experts\": 9");
  fs::remove(dir_ / "config.json");
  std::ofstream(dir_ / "config.json") << text;
  const auto r = take_inventory(dir_.string());
  ASSERT_FALSE(r.ok());
  EXPECT_NE(r.error().message().find("'layers.0.ffn.gate.weight': expected BF16 [9, "), std::string::npos) << r.error().message();
}

}  // namespace
}  // namespace espalier
