// The program's own exp, log, sin and cos against libm in long double, and the quantisers' exact rules.
#include "ops/scalar_math.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/rng.h"
#include "ops/fake_quant.h"
#include "tensor/float_formats.h"

namespace espalier::ops {
namespace {

double relative(double found, long double expected) {
  return static_cast<double>(std::fabs(static_cast<long double>(found) - expected) /
                             std::fmax(std::fabs(expected), 1e-300L));
}

TEST(ScalarMath, exp_is_accurate_to_1e15_and_saturates) {
  const CounterRng rng(1, "exp");
  for (uint64_t i = 0; i < 20000; ++i) {
    const double x = (rng.uniform(i) - 0.5) * 1400.0;
    ASSERT_LT(relative(exp_d(x), std::exp(static_cast<long double>(x))), 1e-15) << x;
  }
  EXPECT_EQ(exp_d(0.0), 1.0);
  EXPECT_EQ(static_cast<float>(exp_d(-1e300)), 0.0f);
  EXPECT_EQ(static_cast<float>(exp_d(-std::numeric_limits<double>::infinity())), 0.0f);
  EXPECT_TRUE(std::isinf(static_cast<float>(exp_d(1e300))));
  EXPECT_TRUE(std::isnan(exp_d(std::nan(""))));
}

TEST(ScalarMath, log_log1p_softplus_sigmoid_and_pow_are_accurate) {
  const CounterRng rng(2, "log");
  for (uint64_t i = 0; i < 20000; ++i) {
    const double x = std::exp((rng.uniform(i) - 0.5) * 200.0);
    ASSERT_NEAR(log_d(x), static_cast<double>(std::log(static_cast<long double>(x))),
                1e-15 * std::fmax(1.0, std::fabs(std::log(x))))
        << x;
    ASSERT_LT(relative(log1p_d(x), std::log1p(static_cast<long double>(x))), 2e-15) << x;
    const double t = (rng.uniform(i) - 0.5) * 100.0;
    const long double exact =
        t > 20.0 ? static_cast<long double>(t) : std::log1p(std::exp(static_cast<long double>(t)));
    ASSERT_LT(relative(softplus_d(t), exact), 4e-15) << t;
    ASSERT_LT(relative(sigmoid_d(t), 1.0L / (1.0L + std::exp(-static_cast<long double>(t)))), 4e-15) << t;
  }
  EXPECT_LT(relative(pow_d(160000.0, 0.96875), std::pow(160000.0L, 0.96875L)), 1e-14);
}

TEST(ScalarMath, sin_and_cos_are_accurate_up_to_a_million_radians) {
  const CounterRng rng(3, "sin");
  for (uint64_t i = 0; i < 20000; ++i) {
    const double x = (rng.uniform(i) - 0.5) * (i % 2 == 0 ? 10.0 : 2.0e6);
    double s, c;
    sincos_d(x, &s, &c);
    ASSERT_NEAR(s, static_cast<double>(std::sin(static_cast<long double>(x))), 1e-15) << x;
    ASSERT_NEAR(c, static_cast<double>(std::cos(static_cast<long double>(x))), 1e-15) << x;
  }
}

// Brute force: the nearest of all representable values, ties to the even code.
float nearest_e2m1(float x) {
  float best = 0;
  int best_code = 0;
  for (int code = 0; code < 8; ++code) {
    const float v = decode_e2m1(static_cast<uint8_t>(code));
    const float a = std::fabs(std::fabs(x) - v), b = std::fabs(std::fabs(x) - best);
    if (a < b || (a == b && code % 2 == 0 && best_code % 2 == 1)) {
      best = v;
      best_code = code;
    }
  }
  return std::copysign(best, x);
}

TEST(FakeQuant, fp4_groups_take_the_smallest_power_of_two_that_fits_and_round_to_nearest_even) {
  ThreadPool pool(1);
  const CounterRng rng(4, "fp4");
  std::vector<float> x(64);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>((rng.uniform(i) - 0.5) * (i < 32 ? 3.0 : 40.0));
  std::vector<float> y = x;
  fake_quant(pool, {y.data(), 1, 64, FakeQuantFormat::kFp4});
  for (size_t g = 0; g < 2; ++g) {
    float top = 0;
    for (size_t i = 0; i < 32; ++i) top = std::fmax(top, std::fabs(x[g * 32 + i]));
    float scale = 0x1p-40f;
    while (scale * 6.0f < top) scale *= 2.0f;
    for (size_t i = g * 32; i < g * 32 + 32; ++i) EXPECT_EQ(y[i], nearest_e2m1(x[i] / scale) * scale) << i;
  }
}

TEST(FakeQuant, compressed_kv_groups_of_16_have_an_e4m3_scale) {
  ThreadPool pool(1);
  std::vector<float> x(32);
  for (size_t i = 0; i < 32; ++i) x[i] = static_cast<float>(i) * 0.37f - 4.0f;
  std::vector<float> y = x;
  fake_quant(pool, {y.data(), 1, 32, FakeQuantFormat::kKv4});
  for (size_t g = 0; g < 2; ++g) {
    float top = 0;
    for (size_t i = 0; i < 16; ++i) top = std::fmax(top, std::fabs(x[g * 16 + i]));
    const float scale = round_e4m3(top / 6.0f);
    for (size_t i = g * 16; i < g * 16 + 16; ++i) {
      EXPECT_EQ(y[i], nearest_e2m1(std::fmin(std::fmax(x[i] / scale, -6.0f), 6.0f)) * scale) << i;
    }
  }
}

TEST(FakeQuant, activations_are_e4m3_with_a_power_of_two_scale_and_quantising_twice_changes_nothing) {
  ThreadPool pool(1);
  std::vector<float> x(70);
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i)) * static_cast<float>(1 + i);
  std::vector<float> y = x;
  fake_quant(pool, {y.data(), 1, 70, FakeQuantFormat::kAct});
  for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(y[i], x[i], std::fabs(x[i]) * 0x1p-4f + 0.2f) << i;
  for (float v : y) EXPECT_EQ(v, round_bf16(v));
  std::vector<float> z = y;
  fake_quant(pool, {z.data(), 1, 70, FakeQuantFormat::kAct});
  EXPECT_EQ(z, y);
  std::vector<float> zeros(32, 0.0f);
  for (FakeQuantFormat f : {FakeQuantFormat::kAct, FakeQuantFormat::kFp4, FakeQuantFormat::kKv4}) {
    fake_quant(pool, {zeros.data(), 1, 32, f});
    EXPECT_EQ(zeros, std::vector<float>(32, 0.0f));
  }
}

}  // namespace
}  // namespace espalier::ops
