#include "codec/matmul.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/rng.h"
#include "bench/peer/golden_cases.h"

namespace espalier::codec {
namespace {

Exl3Tensor random_tensor(int64_t k, int64_t n, int k2, Codebook codebook) {
  const CounterRng rng(9, "tensor");
  Exl3Tensor t;
  t.k = k;
  t.n = n;
  t.k2 = k2;
  t.codebook = codebook;
  t.trellis.resize(static_cast<size_t>(trellis_words(k, n, k2)));
  for (size_t i = 0; i < t.trellis.size(); ++i) t.trellis[i] = static_cast<uint16_t>(rng.bits(i));
  for (int64_t i = 0; i < k; ++i) t.suh.push_back(encode_f16(rng.sign(1000 + i) * static_cast<float>(0.1 + rng.uniform(2000 + i))));
  for (int64_t i = 0; i < n; ++i) t.svh.push_back(encode_f16(rng.sign(8000 + i) * static_cast<float>(0.1 + rng.uniform(9000 + i))));
  return t;
}

std::vector<float> random_rows(int64_t size) {
  const CounterRng rng(10, "rows");
  std::vector<float> x(static_cast<size_t>(size));
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(rng.uniform(i) * 2 - 1);
  return x;
}

std::vector<float> product(const Exl3Tensor& t, const std::vector<float>& x, SimdTier tier, int n_threads = 1) {
  ThreadPool pool(n_threads);
  const int64_t rows = static_cast<int64_t>(x.size()) / t.k;
  std::vector<float> y(static_cast<size_t>(rows * t.n));
  exl3_matmul(pool, t.view(), x.data(), rows, y.data(), tier);
  return y;
}

constexpr int kWidths[] = {2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16};

TEST(Exl3Matmul, every_tier_gives_the_same_bits_at_every_width) {
  for (int k2 : kWidths) {
    for (Codebook codebook : {Codebook::k3Inst, Codebook::kMcg, Codebook::kMul1}) {
      if (k2 % 2 != 0 && codebook != Codebook::kMul1) continue;
      const Exl3Tensor t = random_tensor(256, 128, k2, codebook);
      const std::vector<float> x = random_rows(6 * 256);
      const std::vector<float> expected = product(t, x, SimdTier::kReference);
      for (SimdTier tier : usable_simd_tiers()) {
        EXPECT_EQ(product(t, x, tier), expected) << simd_tier_name(tier) << " K = " << width_text(k2) << " " << codebook_name(codebook);
      }
    }
  }
}

TEST(Exl3Matmul, equals_rotation_plain_chain_and_rotation) {
  const Exl3Tensor t = random_tensor(256, 384, 6, Codebook::kMul1);
  const int64_t rows = 5;
  const std::vector<float> x = random_rows(rows * 256);
  std::vector<float> inner(256 * 384), xh(x.size()), z(static_cast<size_t>(rows * 384)), y(z.size());
  decode_inner(t.view().trellis, inner.data());
  rotate_input(t.view(), x.data(), rows, xh.data());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t o = 0; o < 384; ++o) {
      float sum = 0;
      for (int64_t i = 0; i < 256; ++i) sum = std::fma(xh[static_cast<size_t>(r * 256 + i)], inner[static_cast<size_t>(i * 384 + o)], sum);
      z[static_cast<size_t>(r * 384 + o)] = sum;
    }
  }
  rotate_output(t.view(), z.data(), rows, y.data());
  EXPECT_EQ(product(t, x, best_simd_tier(), 2), y);
}

TEST(Exl3Matmul, a_row_does_not_depend_on_the_batch_or_the_threads) {
  const Exl3Tensor t = random_tensor(256, 256, 4, Codebook::kMul1);
  const std::vector<float> x = random_rows(19 * 256);
  const std::vector<float> all = product(t, x, best_simd_tier(), 1);
  EXPECT_EQ(product(t, x, best_simd_tier(), 2), all);
  EXPECT_EQ(product(t, x, best_simd_tier(), 3), all);
  for (long first = 0; first < 19; ++first) {
    for (long rows : {1L, 2L, 3L, 5L}) {
      if (first + rows > 19) continue;
      const std::vector<float> part(x.begin() + first * 256, x.begin() + (first + rows) * 256);
      const std::vector<float> expected(all.begin() + first * 256, all.begin() + (first + rows) * 256);
      ASSERT_EQ(product(t, part, best_simd_tier()), expected) << first << " " << rows;
    }
  }
}

TEST(Exl3Matmul, no_rows_is_no_work) {
  const Exl3Tensor t = random_tensor(128, 128, 4, Codebook::kMul1);
  EXPECT_TRUE(product(t, {}, best_simd_tier()).empty());
}

// y_ref is x times the decoded weight in float64. Bound: k sums of fp32 products, errors growing like sqrt(k), with two rotations.
TEST(Exl3Matmul, golden_outputs_are_reached_in_fp32) {
  const SafetensorsFile file = golden::open(golden::tree_file("mul1_128.safetensors"));
  for (const std::string& name : golden::linears(file)) {
    const Exl3Tensor t = golden::load(file, name);
    const std::vector<float> y = product(t, golden::floats(file, name + ".x"), best_simd_tier());
    const std::vector<float> expected = golden::floats(file, name + ".y_ref");
    double error = 0;
    double power = 0;
    for (size_t i = 0; i < y.size(); ++i) {
      error += std::pow(double{y[i]} - double{expected[i]}, 2);
      power += std::pow(double{expected[i]}, 2);
    }
    EXPECT_LT(std::sqrt(error / power), 0x1.0p-24 * std::sqrt(128.0)) << name;
    for (size_t i = y.size() - static_cast<size_t>(t.n); i < y.size(); ++i) EXPECT_EQ(y[i], 0.0f) << name;  // the zero row
  }
}

}  // namespace
}  // namespace espalier::codec
