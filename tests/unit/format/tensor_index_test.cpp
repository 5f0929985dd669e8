#include "format/tensor_index.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "base/file.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;

class TensorIndexTest : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::temp_directory_path() / ("espalier_index_" + std::to_string(::getpid()));
    fs::remove_all(dir_);
    fs::create_directories(dir_ / "other");
  }
  void TearDown() override { fs::remove_all(dir_); }

  void shard(const std::string& file, const std::vector<std::string>& names) {
    const Tensor t = Tensor::from<float>({2}, std::vector<float>{1, 2});
    std::vector<NamedView> views;
    for (const auto& n : names) views.push_back({n, t.view()});
    ASSERT_TRUE(write_safetensors(dir_ / file, views).ok());
  }
  void index(const std::string& map) {
    ASSERT_TRUE(write_text_file(dir_ / "model.safetensors.index.json", R"({"metadata":{},"weight_map":)" + map + "}").ok());
  }
  void expect_refused(StatusCode code, const std::string& part) {
    const auto r = TensorIndex::open(dir_);
    ASSERT_FALSE(r.ok());
    EXPECT_EQ(r.error().code(), code) << r.error().message();
    EXPECT_NE(r.error().message().find(part), std::string::npos) << r.error().message();
  }
  fs::path dir_;
};

TEST_F(TensorIndexTest, without_an_index_all_files_are_read_and_doubles_refused) {
  shard("a.safetensors", {"x", "y"});
  shard("b.safetensors", {"z"});
  const auto r = TensorIndex::open(dir_);
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_EQ(r->names(), (std::vector<std::string>{"x", "y", "z"}));
  EXPECT_EQ(r->total_bytes(), 24u);
  shard("c.safetensors", {"x"});
  expect_refused(StatusCode::kDataLoss, "'x'");
}

TEST_F(TensorIndexTest, the_index_decides_which_file_owns_a_tensor) {
  shard("a.safetensors", {"x", "y"});
  shard("b.safetensors", {"x"});
  index(R"({"y":"a.safetensors","x":"b.safetensors"})");
  const auto r = TensorIndex::open(dir_);
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_EQ(r->file_of("x").filename(), "b.safetensors");
  EXPECT_FALSE(r->contains("z"));
}

TEST_F(TensorIndexTest, missing_shards_and_tensors_are_named) {
  shard("a.safetensors", {"x"});
  index(R"({"x":"a.safetensors","q":"gone.safetensors"})");
  expect_refused(StatusCode::kNotFound, "gone.safetensors");
  index(R"({"x":"a.safetensors","q":"a.safetensors"})");
  expect_refused(StatusCode::kDataLoss, "'q'");
}

TEST_F(TensorIndexTest, a_path_that_leaves_the_folder_is_refused) {
  index(R"({"x":"../secret.safetensors"})");
  expect_refused(StatusCode::kDataLoss, "../secret");
  index(R"({"x":"/etc/passwd"})");
  expect_refused(StatusCode::kDataLoss, "/etc/passwd");
  index(R"({"x":7})");
  expect_refused(StatusCode::kDataLoss, "7");
}

TEST_F(TensorIndexTest, a_map_is_read_as_strictly_as_any_json) {
  shard("a.safetensors", {"x", "y"});
  index(R"({"y":"a.safetensors","x":"a.safetensors","y":"a.safetensors"})");
  expect_refused(StatusCode::kDataLoss, "key 'y' appears twice");
  index(R"({"x":"a.safetensors","y":{"z":1}})");
  expect_refused(StatusCode::kDataLoss, "tensor 'y': expected the name of a file in this folder, found an object");
  index(R"({"x":["a.safetensors"]})");
  expect_refused(StatusCode::kDataLoss, "found an array");
  index(R"({"x":null})");
  expect_refused(StatusCode::kDataLoss, "tensor 'x': expected the name of a file in this folder, found null");
  index(R"({})");
  expect_refused(StatusCode::kDataLoss, "weight_map is empty");
  index(R"(["x"])");
  expect_refused(StatusCode::kDataLoss, "an object 'weight_map'");
  index(R"({"x":"a.safetensors"},"weight_map":{"y":"a.safetensors"})");
  expect_refused(StatusCode::kDataLoss, "key 'weight_map' appears twice");
  index(R"({"x":"a.safetensors)");
  expect_refused(StatusCode::kDataLoss, "not valid JSON at byte");
  // Only the member of the root is the map.
  ASSERT_TRUE(write_text_file(dir_ / "model.safetensors.index.json",
                              R"({"metadata":{"weight_map":{"x":3,"list":[{"weight_map":{}}]},"total_size":16},)"
                              R"("weight_map":{"x":"a.safetensors","y":"a.safetensors"}})")
                  .ok());
  const auto r = TensorIndex::open(dir_);
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_EQ(r->declared_bytes(), 16u);
  EXPECT_EQ(r->entry("y"), &r->file(0).entries()[1]);
  EXPECT_EQ(r->entry("z"), nullptr);
}

TEST_F(TensorIndexTest, files_may_live_in_another_named_folder) {
  shard("other/e.safetensors", {"x"});
  index(R"({"x":"e.safetensors"})");
  EXPECT_FALSE(TensorIndex::open(dir_).ok());
  EXPECT_TRUE(TensorIndex::open(dir_, {dir_ / "other"}).ok());
}

TEST_F(TensorIndexTest, absent_tensors_may_be_borrowed_by_name_and_present_ones_are_not_replaced) {
  shard("a.safetensors", {"x"});
  index(R"({"x":"a.safetensors"})");
  shard("other/e.safetensors", {"x", "engram.table", "vision"});
  shard("other/f.safetensors", {"nothing"});
  IndexOptions options;
  options.extra_dirs = {dir_ / "other"};
  options.may_borrow = [](const TensorIndex&, const std::string& name) { return name == "engram.table" || name == "x"; };
  const auto r = TensorIndex::open(dir_, options);
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_EQ(r->names(), (std::vector<std::string>{"engram.table", "x"}));
  EXPECT_EQ(r->file_of("x"), dir_ / "a.safetensors");
  EXPECT_EQ(r->file_of("engram.table"), dir_ / "other/e.safetensors");
  EXPECT_EQ(r->files().size(), 2u);
}

TEST_F(TensorIndexTest, a_side_file_is_read_besides_the_map_and_must_not_repeat_it) {
  shard("a.safetensors", {"x"});
  index(R"({"x":"a.safetensors"})");
  shard("side.safetensors", {"y"});
  IndexOptions options;
  options.side_files = {"side.safetensors", "absent.safetensors"};
  EXPECT_FALSE(TensorIndex::open(dir_)->contains("y"));
  EXPECT_TRUE(TensorIndex::open(dir_, options)->contains("y"));
  shard("side.safetensors", {"x"});
  EXPECT_FALSE(TensorIndex::open(dir_, options).ok());
}

TEST_F(TensorIndexTest, missing_files_and_tensors_outside_the_map_are_noted_when_asked) {
  shard("a.safetensors", {"x", "stray"});
  ASSERT_TRUE(write_text_file(dir_ / "model.safetensors.index.json",
                              R"({"metadata":{"total_size":8},"weight_map":{"x":"a.safetensors","q":"gone.safetensors"}})")
                  .ok());
  IndexOptions options;
  options.allow_missing_files = true;
  const auto r = TensorIndex::open(dir_, options);
  ASSERT_TRUE(r.ok()) << r.error().message();
  EXPECT_EQ(r->missing_files(), (std::vector<std::pair<std::string, size_t>>{{"gone.safetensors", 1}}));
  EXPECT_EQ(r->unmapped(), (std::vector<std::string>{"a.safetensors: stray"}));
  EXPECT_EQ(r->declared_bytes(), 8u);
}

TEST_F(TensorIndexTest, loops_of_links_and_empty_files_are_refused_by_name) {
  fs::create_symlink("b.safetensors", dir_ / "a.safetensors");
  fs::create_symlink("a.safetensors", dir_ / "b.safetensors");
  expect_refused(StatusCode::kNotFound, "a.safetensors");
  index(R"({"x":"a.safetensors"})");
  expect_refused(StatusCode::kDataLoss, "loop of symbolic links");
  fs::remove(dir_ / "a.safetensors");
  ASSERT_TRUE(write_text_file(dir_ / "a.safetensors", "").ok());
  expect_refused(StatusCode::kDataLoss, "a.safetensors': 0 bytes");
  expect_refused(StatusCode::kDataLoss, "puts 1 tensors there (first 'x')");
}

TEST_F(TensorIndexTest, wrong_dtype_or_shape_says_expected_and_found) {
  shard("a.safetensors", {"x"});
  const auto r = TensorIndex::open(dir_);
  ASSERT_TRUE(r.ok());
  EXPECT_TRUE(r->get("x", DType::kF32, {2}).ok());
  const auto wrong = r->get("x", DType::kF32, {3});
  ASSERT_FALSE(wrong.ok());
  EXPECT_NE(wrong.error().message().find("expected F32 [3], found F32 [2]"), std::string::npos) << wrong.error().message();
  EXPECT_FALSE(r->get("x", DType::kBF16, {2}).ok());
  EXPECT_EQ(r->get("nope").error().code(), StatusCode::kNotFound);
}

TEST_F(TensorIndexTest, an_empty_folder_is_refused) { expect_refused(StatusCode::kNotFound, "no safetensors"); }

}  // namespace
}  // namespace espalier
