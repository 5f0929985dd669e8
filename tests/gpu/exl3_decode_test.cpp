#include <gtest/gtest.h>

#include "tests/gpu/exl3_data.h"
#include "bench/peer/golden_cases.h"

namespace espalier::codec::cuda {
namespace {

class Exl3Decode : public ::testing::Test {
 protected:
  std::vector<uint16_t> gpu_inner(const Exl3Tensor& t) {
    const Matrix m = taken(Matrix::upload(stream_, t.view()));
    const auto out = taken(device::DeviceArray<uint16_t>::allocate(0, static_cast<size_t>(t.k * t.n), "inner"));
    must(stream_.fill_bytes(out.data(), 0xFF, out.size() * 2));  // NaN: what is not written shows
    must(decode_inner_f16(stream_, m.view(), out.data()));
    return taken(out.download(stream_));
  }
  template <typename T>
  std::vector<T> gpu_weight(const Exl3Tensor& t, WeightType type) {
    const Matrix m = taken(Matrix::upload(stream_, t.view()));
    const auto out = taken(device::DeviceArray<T>::allocate(0, static_cast<size_t>(t.k * t.n), "weight"));
    must(stream_.fill_bytes(out.data(), 0xFF, out.size() * sizeof(T)));
    must(decode_weight(stream_, m.view(), type, out.data()));
    return taken(out.download(stream_));
  }
  void expect_inner(const Exl3Tensor& t, const std::string& name) {
    std::vector<uint16_t> expected(static_cast<size_t>(t.k * t.n));
    decode_inner_f16(t.view().trellis, expected.data());
    EXPECT_EQ(gpu_inner(t), expected) << name;
  }

  device::Stream stream_ = taken(device::Stream::create(0));
  ThreadPool pool_;
};

TEST_F(Exl3Decode, inner_values_of_golden_tensors_are_equal_bit_for_bit) {
  std::vector<std::filesystem::path> files = {golden::tree_file("mul1_128.safetensors")};
  for (const char* name : {"mul1_larger.safetensors", "other_and_special.safetensors"}) {
    if (std::filesystem::exists(golden::shared_file(name))) files.push_back(golden::shared_file(name));
  }
  int n_checked = 0;
  for (const auto& path : files) {
    const SafetensorsFile file = golden::open(path);
    for (const std::string& name : golden::linears(file)) {
      if (file.find(name + ".inner") == nullptr) continue;
      EXPECT_EQ(gpu_inner(golden::load(file, name)), golden::values<uint16_t>(file, name + ".inner")) << name;
      ++n_checked;
    }
  }
  EXPECT_GE(n_checked, 7);
}

TEST_F(Exl3Decode, inner_values_are_equal_at_every_width_codebook_and_awkward_size) {
  for (const auto& [k, n] : {std::pair<int64_t, int64_t>{128, 128}, {384, 128}, {128, 640}}) {
    for (int k2 : kAllWidths) {
      for (Codebook codebook : {Codebook::k3Inst, Codebook::kMcg, Codebook::kMul1}) {
        if (k2 % 2 != 0 && codebook != Codebook::kMul1) continue;
        const std::string name = "K " + width_text(k2) + " " + std::string(codebook_name(codebook));
        expect_inner(random_tensor(k, n, k2, codebook, name), name);
      }
    }
  }
}

TEST_F(Exl3Decode, inner_values_are_equal_at_the_real_shape) {
  expect_inner(random_tensor(5120, 2304, 6, Codebook::kMul1, "gate"), "5120 x 2304");
}

// 14 butterfly stages, two constants and two scales: 18 roundings of at most 2^-24, relative to intermediates that stay below six times
// the spread 1 of the codebook (3inst, mcg: 1.25).
TEST_F(Exl3Decode, weights_differ_from_float64_by_roundings_only) {
  for (Codebook codebook : {Codebook::k3Inst, Codebook::kMcg, Codebook::kMul1}) {
    const Exl3Tensor t = random_tensor(384, 256, 6, codebook, "weight");
    const std::vector<float> expected = cpu_weight(t, pool_), got = gpu_weight<float>(t, WeightType::kF32);
    double worst = 0;
    for (int64_t i = 0; i < t.k * t.n; ++i) {
      const double unit = std::fabs(double(decode_f16(t.suh[static_cast<size_t>(i / t.n)])) * decode_f16(t.svh[static_cast<size_t>(i % t.n)]));
      worst = std::max(worst, std::fabs(double(got[static_cast<size_t>(i)]) - expected[static_cast<size_t>(i)]) / unit);
    }
    EXPECT_LE(worst, 18 * 0x1.0p-24 * 6 * 1.25) << codebook_name(codebook);
  }
}

TEST_F(Exl3Decode, narrow_weights_are_the_wide_ones_rounded_once) {
  const Exl3Tensor t = random_tensor(128, 384, 5, Codebook::kMul1, "narrow");
  const std::vector<float> wide = gpu_weight<float>(t, WeightType::kF32);
  const std::vector<uint16_t> f16 = gpu_weight<uint16_t>(t, WeightType::kF16), bf16 = gpu_weight<uint16_t>(t, WeightType::kBF16);
  for (size_t i = 0; i < wide.size(); ++i) {
    ASSERT_EQ(f16[i], encode_f16(wide[i])) << i;
    ASSERT_EQ(bf16[i], encode_bf16(wide[i])) << i;
  }
}

}  // namespace
}  // namespace espalier::codec::cuda
