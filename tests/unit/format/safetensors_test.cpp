#include "format/safetensors.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <vector>

#include "base/rng.h"

namespace espalier {
namespace {

namespace fs = std::filesystem;
using ::testing::Test;

std::vector<uint8_t> file_bytes(const std::string& header, size_t data_bytes) {
  std::vector<uint8_t> out(8 + header.size() + data_bytes);
  for (int i = 0; i < 8; ++i) out[static_cast<size_t>(i)] = static_cast<uint8_t>(header.size() >> (8 * i));
  std::memcpy(out.data() + 8, header.data(), header.size());
  return out;
}

Result<SafetensorsHeader> parse(const std::string& header, size_t data_bytes) {
  const auto bytes = file_bytes(header, data_bytes);
  return parse_safetensors_header(bytes, bytes.size(), "shard.safetensors");
}

void expect_refused(const std::string& header, size_t data_bytes, const std::string& part) {
  const auto r = parse(header, data_bytes);
  ASSERT_FALSE(r.ok()) << header;
  EXPECT_EQ(r.error().code(), StatusCode::kDataLoss);
  EXPECT_NE(r.error().message().find("shard.safetensors"), std::string::npos) << r.error().message();
  EXPECT_NE(r.error().message().find(part), std::string::npos) << r.error().message();
}

constexpr const char* kGood =
    R"({"__metadata__":{"k":"v"},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]},"a":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}})";

TEST(SafetensorsHeader, good_header_lists_tensors_in_file_order) {
  const auto r = parse(kGood, 12);
  ASSERT_TRUE(r.ok()) << r.error().message();
  ASSERT_EQ(r->entries.size(), 2u);
  EXPECT_EQ(r->entries[0].name, "a");
  EXPECT_EQ(r->entries[1].dtype, DType::kF32);
  EXPECT_EQ(r->metadata.at("k"), "v");
}

TEST(SafetensorsHeader, truncated_data_is_data_loss_and_names_file_and_tensor) {
  expect_refused(kGood, 11, "tensor 'b'");
}

TEST(SafetensorsHeader, padded_data_is_refused) { expect_refused(kGood, 13, "padded"); }

TEST(SafetensorsHeader, gaps_and_overlaps_are_refused) {
  expect_refused(R"({"a":{"dtype":"I8","shape":[4],"data_offsets":[1,5]}})", 5, "gap");
  expect_refused(R"({"a":{"dtype":"I8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"I8","shape":[4],"data_offsets":[2,6]}})", 6,
                 "overlaps");
}

TEST(SafetensorsHeader, size_must_equal_shape_times_dtype) {
  expect_refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4, "needs 8 bytes");
}

TEST(SafetensorsHeader, duplicate_names_are_refused) {
  expect_refused(R"({"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"I8","shape":[1],"data_offsets":[1,2]}})", 2,
                 "twice");
}

TEST(SafetensorsHeader, names_repeated_far_apart_and_keys_repeated_inside_are_refused) {
  expect_refused(R"({"b":{"dtype":"I8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"I8","shape":[1],"data_offsets":[1,2]},)"
                 R"("b":{"dtype":"I8","shape":[1],"data_offsets":[2,3]}})",
                 3, "key 'b' appears twice");
  expect_refused(R"({"a":{"dtype":"I8","shape":[1],"dtype":"I8","data_offsets":[0,1]}})", 1, "key 'dtype' appears twice");
  expect_refused(R"({"__metadata__":{"k":"v","k":"w"}})", 0, "key 'k' appears twice");
  expect_refused(R"({"__metadata__":{},"__metadata__":{}})", 0, "key '__metadata__' appears twice");
  EXPECT_TRUE(parse(R"({"__metadata__":{"a":"x"},"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}})", 1).ok());
}

TEST(SafetensorsHeader, overflowing_shapes_are_refused) {
  expect_refused(R"({"a":{"dtype":"F64","shape":[4611686018427387904,8],"data_offsets":[0,0]}})", 0, "64 bits");
  expect_refused(R"({"a":{"dtype":"I8","shape":[18446744073709551615],"data_offsets":[0,1]}})", 1, "64 bits");
}

TEST(SafetensorsHeader, wrong_types_and_unknown_dtypes_are_refused) {
  expect_refused(R"({"a":{"dtype":"F4","shape":[1],"data_offsets":[0,1]}})", 1, "unknown dtype 'F4'");
  expect_refused(R"({"a":{"dtype":1,"shape":[1],"data_offsets":[0,1]}})", 1, "dtype");
  expect_refused(R"({"a":{"dtype":"I8","shape":[-1],"data_offsets":[0,1]}})", 1, "non-negative");
  expect_refused(R"({"a":{"dtype":"I8","shape":[1.5],"data_offsets":[0,1]}})", 1, "non-negative");
  expect_refused(R"({"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1],"x":0}})", 1, "exactly");
  expect_refused(R"({"a":[]})", 0, "object");
  expect_refused(R"({"__metadata__":{"k":1}})", 0, "not a string");
  expect_refused(R"({"__metadata__":[]})", 0, "__metadata__ is not an object");
  expect_refused(R"({"a":{"shape":[1],"data_offsets":[0,1]}})", 1, "exactly the keys");
  expect_refused(R"({"a":{"dtype":"I8","shape":1,"data_offsets":[0,1]}})", 1, "shape is not an array");
  expect_refused(R"({"a":{"dtype":"I8","shape":[[1]],"data_offsets":[0,1]}})", 1, "shape: expected a non-negative integer");
  expect_refused(R"({"a":{"dtype":"I8","shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}})", 1, "at most 16");
  expect_refused(R"({"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1,1]}})", 1, "not a pair");
  expect_refused(R"({"a":{"dtype":"I8","shape":[1],"data_offsets":[0]}})", 1, "not a pair");
  expect_refused(R"({"a":{"dtype":"I8","shape":[1],"data_offsets":{}}})", 1, "not a pair");
  expect_refused(R"({"a":{"dtype":"I8","shape":[1],"data_offsets":[0,"1"]}})", 1, "data_offsets: expected a non-negative integer");
  expect_refused(R"({"":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}})", 1, "empty name");
  expect_refused("{}{}", 0, "JSON");
  expect_refused(R"([])", 0, "'{'");
  expect_refused("{", 0, "JSON");
}

TEST(SafetensorsHeader, header_length_beyond_the_file_is_refused) {
  auto bytes = file_bytes(kGood, 12);
  bytes[7] = 0x7F;
  EXPECT_EQ(parse_safetensors_header(bytes, bytes.size(), "x").error().code(), StatusCode::kDataLoss);
  EXPECT_EQ(parse_safetensors_header(std::span(bytes).first(5), 5, "x").error().code(), StatusCode::kDataLoss);
}

TEST(SafetensorsHeader, no_single_changed_byte_crashes_the_parser) {
  const auto good = file_bytes(kGood, 12);
  const CounterRng rng(1, "bytes");
  for (size_t i = 0; i < 8 + std::strlen(kGood); ++i) {
    auto bytes = good;
    bytes[i] = static_cast<uint8_t>(rng.bits(i));
    (void)parse_safetensors_header(bytes, bytes.size(), "x").ok();
  }
  SUCCEED();
}

class SafetensorsFileTest : public Test {
 protected:
  void SetUp() override {
    dir_ = fs::temp_directory_path() / ("espalier_st_" + std::to_string(::getpid()));
    fs::create_directories(dir_);
  }
  void TearDown() override { fs::remove_all(dir_); }
  fs::path dir_;
};

TEST_F(SafetensorsFileTest, what_is_written_is_read_back) {
  const Tensor a = Tensor::from<float>({2, 2}, std::vector<float>{1, 2, 3, 4});
  const Tensor b = Tensor::from<int8_t>({3}, std::vector<int8_t>{7, 8, 9});
  const Tensor scalar = Tensor::from<int32_t>({}, std::vector<int32_t>{-5});
  const fs::path path = dir_ / "x.safetensors";
  ASSERT_TRUE(write_safetensors(path, {{"b", b.view()}, {"a", a.view()}, {"s", scalar.view()}}, {{"m", "n"}}).ok());
  auto f = SafetensorsFile::open(path);
  ASSERT_TRUE(f.ok()) << f.error().message();
  EXPECT_EQ(f->metadata().at("m"), "n");
  EXPECT_EQ(std::memcmp(f->get("a")->data, a.data(), 16), 0);
  EXPECT_EQ(std::memcmp(f->get("b")->data, b.data(), 3), 0);
  EXPECT_TRUE(f->get("s")->shape.empty());
  EXPECT_EQ(f->get("zz").error().code(), StatusCode::kNotFound);
}

TEST_F(SafetensorsFileTest, a_writer_that_was_given_too_little_does_not_commit) {
  auto w = SafetensorsWriter::create(dir_ / "y.safetensors", {{"a", DType::kF32, {4}}});
  ASSERT_TRUE(w.ok());
  const std::vector<uint8_t> bytes(15);
  ASSERT_TRUE(w->write(bytes).ok());
  EXPECT_EQ(w->commit().code(), StatusCode::kInternal);
  EXPECT_FALSE(fs::exists(dir_ / "y.safetensors"));
}

TEST_F(SafetensorsFileTest, repeated_or_reserved_names_are_refused) {
  EXPECT_FALSE(SafetensorsWriter::create(dir_ / "z", {{"a", DType::kF32, {1}}, {"a", DType::kF32, {1}}}).ok());
  EXPECT_FALSE(SafetensorsWriter::create(dir_ / "z", {{"__metadata__", DType::kF32, {1}}}).ok());
}

TEST(SafetensorsGolden, reads_the_files_of_another_writer) {
  auto f = SafetensorsFile::open(ESPALIER_GOLDEN_DIR "/exl3/mul1_128.safetensors");
  ASSERT_TRUE(f.ok()) << f.error().message();
  const auto v = f->get("mul1_128x128_k3.trellis");
  ASSERT_TRUE(v.ok());
  EXPECT_EQ(v->dtype, DType::kI16);
  EXPECT_EQ(v->shape, (Shape{8, 8, 48}));
}

}  // namespace
}  // namespace espalier
