#include "codec/exl3_tensor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <limits>

#include "bench/peer/golden_cases.h"

namespace espalier::codec {
namespace {

using ::testing::HasSubstr;

// Inner values bit for bit; the weight to the rounding of one float (upstream's `dec` is float64 rounded once, ours too, but the
// products were formed in another order).
void expect_golden_decodes(const std::filesystem::path& path, int n_expected) {
  const SafetensorsFile file = golden::open(path);
  ThreadPool pool(2);
  int n_checked = 0;
  for (const std::string& name : golden::linears(file)) {
    if (file.find(name + ".inner") == nullptr) continue;
    const Exl3Tensor tensor = golden::load(file, name);
    std::vector<uint16_t> inner(static_cast<size_t>(tensor.k * tensor.n));
    decode_inner_f16(tensor.view().trellis, inner.data());
    EXPECT_EQ(inner, golden::values<uint16_t>(file, name + ".inner")) << name;
    std::vector<float> as_float(inner.size());
    decode_inner(tensor.view().trellis, as_float.data());
    for (size_t i = 0; i < inner.size(); ++i) ASSERT_EQ(as_float[i], decode_f16(inner[i])) << name << " " << i;

    const std::vector<float> expected = golden::floats(file, name + ".dec");
    std::vector<float> weight(expected.size());
    decode_weight(tensor.view(), weight.data(), pool);
    size_t worst = 0;
    double worst_ratio = 0;
    for (size_t i = 0; i < weight.size(); ++i) {
      const double bound = 0x1.0p-23 * std::fabs(expected[i]) + 1e-30;
      const double ratio = std::fabs(double{weight[i]} - double{expected[i]}) / bound;
      if (ratio > worst_ratio) {
        worst_ratio = ratio;
        worst = i;
      }
    }
    EXPECT_LE(worst_ratio, 1.0) << name << " element " << worst << ": " << weight[worst] << " expected " << expected[worst];
    ++n_checked;
  }
  EXPECT_EQ(n_checked, n_expected);
}

TEST(Exl3Tensor, golden_decodes_are_equal) { expect_golden_decodes(golden::tree_file("mul1_128.safetensors"), 7); }

TEST(Exl3Tensor, golden_decodes_of_the_larger_files_are_equal) {
  if (!std::filesystem::exists(golden::shared_file("mul1_larger.safetensors"))) {
    std::printf("the larger golden EXL3 files are not here (%s); only the tracked ones were checked\n",
                golden::shared_file("").c_str());
    return;
  }
  expect_golden_decodes(golden::shared_file("mul1_larger.safetensors"), 4);
  expect_golden_decodes(golden::shared_file("other_and_special.safetensors"), 15);
}

// A valid tensor in memory whose parts tests break one at a time.
struct Fixture {
  std::vector<int16_t> trellis = std::vector<int16_t>(8 * 16 * 48, 7);
  std::vector<uint16_t> suh = std::vector<uint16_t>(128, 0x3C00);
  std::vector<uint16_t> svh = std::vector<uint16_t>(256, 0xBC00);
  int32_t mul1 = static_cast<int32_t>(kMul1Multiplier);
  int32_t mcg = static_cast<int32_t>(kMcgMultiplier);
  std::vector<int16_t> signs = std::vector<int16_t>(8, 0x00F0);
  Exl3Parts parts;

  Fixture() {
    parts.trellis = ConstView{trellis.data(), DType::kI16, {8, 16, 48}};
    parts.suh = ConstView{suh.data(), DType::kF16, {128}};
    parts.svh = ConstView{svh.data(), DType::kF16, {256}};
    parts.mul1 = ConstView{&mul1, DType::kI32, {}};
  }
};

void expect_refused(const Fixture& f, const std::vector<std::string>& words, StatusCode code = StatusCode::kDataLoss) {
  const Result<Exl3View> view = view_exl3("layers.3.down", f.parts);
  ASSERT_FALSE(view.ok());
  EXPECT_EQ(view.error().code(), code) << view.error().message();
  EXPECT_THAT(view.error().message(), HasSubstr("layers.3.down"));
  for (const std::string& word : words) EXPECT_THAT(view.error().message(), HasSubstr(word));
  if (code == StatusCode::kDataLoss) {
    EXPECT_FALSE(load_exl3("layers.3.down", f.parts).ok());
  }
}

TEST(Exl3Reader, width_and_codebook_come_from_shape_and_markers) {
  Fixture f;
  const Exl3View view = view_exl3("x", f.parts).value();
  EXPECT_EQ(view.k(), 128);
  EXPECT_EQ(view.n(), 256);
  EXPECT_EQ(view.trellis.k2, 6);
  EXPECT_EQ(view.trellis.codebook, Codebook::kMul1);
  f.parts.mul1.reset();
  EXPECT_EQ(view_exl3("x", f.parts)->trellis.codebook, Codebook::k3Inst);
  f.parts.mcg = ConstView{&f.mcg, DType::kI32, {}};
  EXPECT_EQ(view_exl3("x", f.parts)->trellis.codebook, Codebook::kMcg);
}

TEST(Exl3Reader, unknown_multiplier_is_refused) {
  Fixture f;
  f.mul1 ^= 2;
  expect_refused(f, {"mul1", "multiplier"});
}

TEST(Exl3Reader, both_markers_are_refused) {
  Fixture f;
  f.parts.mcg = ConstView{&f.mcg, DType::kI32, {}};
  expect_refused(f, {"both"});
}

TEST(Exl3Reader, marker_of_another_type_is_refused) {
  Fixture f;
  f.parts.mul1 = ConstView{&f.mul1, DType::kF32, {}};
  expect_refused(f, {"mul1", "scalar"});
  const int32_t two[2] = {f.mul1, f.mul1};
  f.parts.mul1 = ConstView{two, DType::kI32, {2}};
  expect_refused(f, {"mul1", "scalar"});
  f.parts.mul1 = ConstView{&f.mul1, DType::kI32, {1}};  // some writers keep a dimension of one
  EXPECT_TRUE(view_exl3("x", f.parts).ok());
}

TEST(Exl3Reader, wrong_shapes_and_types_are_refused_with_expected_and_found) {
  {
    Fixture f;
    f.parts.trellis->shape = {8, 16, 40};  // 2.5 bits would fit mul1, but the bytes are 3 bits
    EXPECT_EQ(view_exl3("x", f.parts)->trellis.k2, 5);
    f.parts.mul1.reset();
    expect_refused(f, {"2.5", "mul1 only"});
  }
  for (const Shape& shape : {Shape{8, 16, 44}, Shape{8, 16, 72}, Shape{8, 16, 0}, Shape{8, 16, 144}, Shape{7, 16, 48},
                             Shape{8, 12, 48}, Shape{0, 16, 48}, Shape{8, 768}}) {
    Fixture f;
    f.parts.trellis->shape = shape;
    expect_refused(f, {"trellis", shape_text(shape)});
  }
  {
    Fixture f;
    f.parts.trellis->dtype = DType::kF16;
    expect_refused(f, {"trellis", "I16"});
  }
  {
    Fixture f;
    f.parts.suh->shape = {256};
    expect_refused(f, {"suh", "[128]", "[256]"});
  }
  {
    Fixture f;
    f.parts.svh->dtype = DType::kBF16;
    expect_refused(f, {"svh", "F16", "BF16"});
  }
}

TEST(Exl3Reader, missing_parts_are_named) {
  Fixture f;
  f.parts.svh.reset();
  expect_refused(f, {"svh", "missing"});
  f.parts.trellis.reset();
  expect_refused(f, {"trellis", "missing"});
}

TEST(Exl3Reader, non_finite_scale_is_refused_with_its_index) {
  for (uint16_t bits : {uint16_t{0x7C00}, uint16_t{0xFC00}, uint16_t{0x7E01}}) {
    Fixture f;
    f.suh[77] = bits;
    expect_refused(f, {"suh", "77"});
    Fixture g;
    g.svh[200] = bits;
    expect_refused(g, {"svh", "200"});
  }
}

TEST(Exl3Reader, old_packed_signs_are_expanded_when_loaded) {
  Fixture f;
  f.parts.suh.reset();
  f.parts.su = ConstView{f.signs.data(), DType::kI16, {8}};
  expect_refused(f, {"packed signs"}, StatusCode::kUnimplemented);
  const Exl3Tensor t = load_exl3("x", f.parts).value();
  for (int i = 0; i < 128; ++i) EXPECT_EQ(t.suh[static_cast<size_t>(i)], (0x00F0 >> (i % 16)) & 1 ? 0xBC00 : 0x3C00) << i;
  f.parts.su->shape = {7};
  const Result<Exl3Tensor> wrong = load_exl3("x", f.parts);
  ASSERT_FALSE(wrong.ok());
  EXPECT_THAT(wrong.error().message(), HasSubstr("[8]"));
}

TEST(Exl3Reader, data_at_an_odd_address_loads_equally) {
  Fixture f;
  for (size_t i = 0; i < f.trellis.size(); ++i) f.trellis[i] = static_cast<int16_t>(i * 7919);
  const Exl3Tensor expected = load_exl3("x", f.parts).value();
  std::vector<uint8_t> bytes(f.trellis.size() * 2 + 1);
  std::memcpy(bytes.data() + 1, f.trellis.data(), f.trellis.size() * 2);
  f.parts.trellis->data = bytes.data() + 1;
  EXPECT_EQ(view_exl3("x", f.parts).error().code(), StatusCode::kUnimplemented);
  EXPECT_EQ(load_exl3("x", f.parts)->trellis, expected.trellis);
}

TEST(Exl3Writer, stored_parts_read_back_equal_for_every_codebook) {
  for (Codebook c : {Codebook::k3Inst, Codebook::kMcg, Codebook::kMul1}) {
    Fixture f;
    Exl3Tensor t = load_exl3("x", f.parts).value();
    t.codebook = c;
    const std::vector<NamedPart> stored = stored_parts("a.b", t);
    const TensorLookup find = [&](const std::string& name) -> std::optional<ConstView> {
      for (const NamedPart& part : stored) {
        if (part.name == name) return part.view;
      }
      return std::nullopt;
    };
    EXPECT_TRUE(is_exl3(find, "a.b"));
    EXPECT_FALSE(is_exl3(find, "a"));
    const Exl3Tensor back = load_exl3("a.b", find_exl3_parts(find, "a.b")).value();
    EXPECT_EQ(back.trellis, t.trellis);
    EXPECT_EQ(back.suh, t.suh);
    EXPECT_EQ(back.svh, t.svh);
    EXPECT_EQ(back.codebook, c);
    EXPECT_EQ(find("a.b.mul1").has_value(), c == Codebook::kMul1);
    EXPECT_EQ(find("a.b.mcg").has_value(), c == Codebook::kMcg);
  }
}

}  // namespace
}  // namespace espalier::codec
