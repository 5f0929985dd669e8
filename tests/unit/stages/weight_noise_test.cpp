// Noise made from encoding errors keeps their size output by output.
#include "stages/weight_noise.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/rng.h"

namespace espalier {
namespace {

constexpr int64_t kIn = 24, kOut = 10;

std::vector<float> values(std::string_view name) {
  const CounterRng rng(5, name);
  std::vector<float> w(kIn * kOut);
  for (size_t i = 0; i < w.size(); ++i) w[i] = static_cast<float>(rng.uniform(i) - 0.5);
  return w;
}

std::vector<ExpertWeights> experts(const std::vector<float>& w1) {
  std::vector<ExpertWeights> out(1);
  out[0].w1 = Linear::from_kn(w1.data(), kIn, kOut);
  out[0].w3 = Linear::from_kn(values("w3").data(), kIn, kOut);
  out[0].w2 = Linear::from_kn(values("w2").data(), kIn, kOut);
  return out;
}

class WeightNoiseTest : public testing::TestWithParam<NoiseShape> {
 protected:
  WeightNoiseTest() : native_(values("native")), pack_(native_) {
    const std::vector<float> error = values("error");
    for (size_t i = 0; i < pack_.size(); ++i) pack_[i] += 0.1f * error[i];
  }
  std::vector<float> noisy(double amplitude, int draw, uint64_t seed = 0, int layer = 3) {
    const WeightNoise noise{GetParam(), amplitude, draw, seed};
    std::vector<float> w(kIn * kOut), w3(kIn * kOut);
    const std::vector<ExpertWeights> made = noisy_experts(experts(native_), experts(pack_), noise, layer, pool_);
    made[0].w1.weight_kn(pool_, w.data());
    made[0].w3.weight_kn(pool_, w3.data());
    EXPECT_EQ(w3, values("w3"));  // no error, no noise
    return w;
  }
  ThreadPool pool_{2};
  std::vector<float> native_, pack_;
};

TEST_P(WeightNoiseTest, EveryOutputHasTheNormOfItsError) {
  const std::vector<float> half = noisy(0.5, 1);
  for (int64_t o = 0; o < kOut; ++o) {
    double of_noise = 0, of_error = 0;
    for (int64_t i = 0; i < kIn; ++i) {
      const auto at = static_cast<size_t>(i * kOut + o);
      const double n = static_cast<double>(half[at]) - static_cast<double>(native_[at]), e = static_cast<double>(pack_[at]) - static_cast<double>(native_[at]);
      of_noise += n * n;
      of_error += e * e;
      if (GetParam() == NoiseShape::kShaped) {
        EXPECT_NEAR(std::abs(n), 0.5 * std::abs(e), 1e-7);
      }
    }
    EXPECT_NEAR(std::sqrt(of_noise), 0.5 * std::sqrt(of_error), 1e-6);
  }
}

TEST_P(WeightNoiseTest, OppositeDrawsCancelAndOthersDiffer) {
  const std::vector<float> plus = noisy(1, 2), minus = noisy(1, -2);
  for (size_t i = 0; i < plus.size(); ++i) EXPECT_NEAR((plus[i] + minus[i]) / 2, native_[i], 1e-7);
  EXPECT_EQ(plus, noisy(1, 2));
  EXPECT_NE(plus, noisy(1, 1));
  EXPECT_NE(plus, noisy(1, 2, 1));
  EXPECT_NE(plus, noisy(1, 2, 0, 4));
}

TEST_P(WeightNoiseTest, NoAmplitudeIsTheNativeMatrix) { EXPECT_EQ(noisy(0, 1), native_); }

INSTANTIATE_TEST_SUITE_P(Shapes, WeightNoiseTest, testing::Values(NoiseShape::kShaped, NoiseShape::kWhite));

}  // namespace
}  // namespace espalier
