#include <cmath>

#include "conformance/ops_cases.h"
#include "ops/matmul.h"

namespace espalier::ops {
namespace {

struct Size {
  int64_t rows, k, n;
};

TEST(OpsMatmul, all_tiers_give_equal_bits_and_agree_with_the_reference) {
  for (const Size s : {Size{0, 8, 8}, Size{1, 1, 1}, Size{1, 7, 3}, Size{2, 31, 33}, Size{3, 64, 32}, Size{5, 0, 4},
                       Size{4, 17, 0}, Size{13, 127, 65}, Size{25, 256, 96}, Size{97, 129, 257}, Size{12, 1024, 24}}) {
    const std::string what = std::to_string(s.rows) + "x" + std::to_string(s.k) + "x" + std::to_string(s.n);
    const std::vector<float> x = random_floats("x" + what, s.rows * s.k);
    const std::vector<float> w = random_floats("w" + what, s.k * s.n);
    const PackedMatrix packed = pack_kn(w.data(), s.k, s.n);
    expect_conformance(
        "matmul " + what,
        [&](ThreadPool& pool) {
          std::vector<float> y(static_cast<size_t>(s.rows * s.n), 99.0f);
          matmul(pool, {x.data(), s.rows, &packed, y.data()});
          return y;
        },
        [&](size_t i) {
          double size = 0;  // |x|.|w| of this output
          for (int64_t j = 0; j < s.k; ++j) {
            size += std::fabs(static_cast<double>(
                                  x[i / static_cast<size_t>(s.n) * static_cast<size_t>(s.k) + static_cast<size_t>(j)]) *
                              static_cast<double>(w[static_cast<size_t>(j * s.n) + i % static_cast<size_t>(s.n)]));
          }
          return static_cast<double>(s.k + 1) * kEps * size;
        });
  }
}

TEST(OpsMatmul, one_output_is_the_chain_of_fused_multiply_adds_over_ascending_k) {
  const int64_t k = 301, n = 37;
  const std::vector<float> x = random_floats("chain x", k), w = random_floats("chain w", k * n);
  const PackedMatrix packed = pack_kn(w.data(), k, n);
  ThreadPool pool(1);
  for (SimdTier tier : usable_simd_tiers()) {
    ASSERT_TRUE(set_simd_tier(tier));
    std::vector<float> y(static_cast<size_t>(n));
    matmul(pool, {x.data(), 1, &packed, y.data()});
    for (int64_t o = 0; o < n; ++o) {
      float chain = 0;
      for (int64_t i = 0; i < k; ++i)
        chain = std::fma(x[static_cast<size_t>(i)], w[static_cast<size_t>(i * n + o)], chain);
      ASSERT_EQ(y[static_cast<size_t>(o)], chain) << simd_tier_name(tier) << " output " << o;
    }
  }
  reset_simd_tier();
}

// The emulated FMA of the baseline must also be exact where products underflow, cancel or overflow.
TEST(OpsMatmul, extreme_values_follow_the_correctly_rounded_chain_in_every_tier) {
  const std::vector<float> values = {
      0.0f,        -0.0f,      1.0f,     -1.0f,         0x1p-149f,      -0x1p-149f, 0x1.fffffep127f,
      0x1p-126f,   0x1.8p-75f, 0x1p-74f, 0x1.000002p0f, 0x1.fffffep-1f, INFINITY,   -INFINITY,
      0x1.5p-100f, 0x1p100f,   3.0f,     0x1.555556p-2f};
  ThreadPool pool(1);
  for (float a : values) {
    for (float b : values) {
      for (float c : values) {
        const float x[2] = {c, a};
        const float w[2] = {1.0f, b};
        const PackedMatrix packed = pack_kn(w, 2, 1);
        const float expected = std::fma(a, b, std::fma(c, 1.0f, 0.0f));
        for (SimdTier tier : usable_simd_tiers()) {
          ASSERT_TRUE(set_simd_tier(tier));
          float y = 0;
          matmul(pool, {x, 1, &packed, &y});
          if (std::isnan(expected)) {
            ASSERT_TRUE(std::isnan(y)) << simd_tier_name(tier) << ": " << a << " * " << b << " + " << c;
          } else {
            ASSERT_EQ(y, expected) << simd_tier_name(tier) << ": " << a << " * " << b << " + " << c;
          }
        }
      }
    }
  }
  reset_simd_tier();
}

TEST(OpsMatmul, a_rows_result_does_not_depend_on_the_other_rows) {
  const int64_t k = 200, n = 70, rows = 41;
  const std::vector<float> x = random_floats("rows x", rows * k), w = random_floats("rows w", k * n);
  const PackedMatrix packed = pack_kn(w.data(), k, n);
  ThreadPool pool(2);
  std::vector<float> whole(static_cast<size_t>(rows * n)), cut(whole.size());
  matmul(pool, {x.data(), rows, &packed, whole.data()});
  for (int64_t begin = 0, step = 1; begin < rows; begin += step, step = step % 7 + 1) {
    const int64_t take = std::min(step, rows - begin);
    matmul(pool, {x.data() + begin * k, take, &packed, cut.data() + begin * n});
  }
  EXPECT_EQ(std::memcmp(whole.data(), cut.data(), whole.size() * 4), 0);
}

TEST(OpsMatmul, packing_by_rows_and_by_columns_agree_and_unpack) {
  const int64_t k = 19, n = 45;
  const std::vector<float> w = random_floats("pack", k * n);
  const PackedMatrix a = pack_kn(w.data(), k, n);
  const PackedMatrix b = pack_rows(k, n, [&](int64_t o, float* out) {
    for (int64_t i = 0; i < k; ++i) out[i] = w[static_cast<size_t>(i * n + o)];
  });
  EXPECT_EQ(std::memcmp(a.panels.data(), b.panels.data(), static_cast<size_t>(a.panels.size_bytes())), 0);
  std::vector<float> back(w.size());
  unpack_kn(a, back.data());
  EXPECT_EQ(back, w);
}

}  // namespace
}  // namespace espalier::ops
