#include "ops/rope.h"

#include <algorithm>
#include <cmath>

#include "base/simd_tier.h"
#include "ops/parallel.h"
#include "ops/scalar_math.h"

namespace espalier::ops {

std::vector<float> rope_frequencies(int64_t rope_dim, double base) {
  std::vector<float> f(static_cast<size_t>(rope_dim / 2));
  for (size_t i = 0; i < f.size(); ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(rope_dim);
    const float power = static_cast<float>(pow_d(base, static_cast<double>(exponent)));
    f[i] = 1.0f / power;
  }
  return f;
}

std::vector<float> yarn_frequencies(int64_t rope_dim, double base, const YarnParams& yarn) {
  std::vector<float> f = rope_frequencies(rope_dim, base);
  const double dim = static_cast<double>(rope_dim);
  // Channel at which a wavelength makes `rotations` turns within the original context.
  const auto correction = [&](double rotations) {
    const double turns = static_cast<double>(yarn.original_positions) / (rotations * 2.0 * 3.14159265358979323846);
    return dim * log_d(turns) / (2.0 * log_d(base));
  };
  const double low = std::max(std::floor(correction(yarn.beta_fast)), 0.0);
  const double high = std::min(std::ceil(correction(yarn.beta_slow)), dim - 1.0);
  const float span = static_cast<float>(high == low ? 0.001 : high - low);
  for (size_t i = 0; i < f.size(); ++i) {
    const float ramp = std::clamp((static_cast<float>(i) - static_cast<float>(low)) / span, 0.0f, 1.0f);
    const float smooth = 1.0f - ramp;
    f[i] = f[i] / static_cast<float>(yarn.factor) * (1.0f - smooth) + f[i] * smooth;
  }
  return f;
}

void rope(ThreadPool& pool, const RopeParams& p) {
  if (active_simd_tier() == SimdTier::kReference) return reference::rope(p);
  const int64_t pairs = p.rope_dim / 2;
  const double cost = static_cast<double>(pairs) * (30.0 + 2.0 * static_cast<double>(p.n_heads));
  for_rows(pool, p.n_rows, cost, [&](int64_t begin, int64_t end) {
    std::vector<float> table(static_cast<size_t>(2 * pairs));
    for (int64_t t = begin; t < end; ++t) {
      const float position = static_cast<float>(p.positions[t]);
      for (int64_t i = 0; i < pairs; ++i) {
        double s, c;
        sincos_d(static_cast<double>(position * p.frequencies[i]), &s, &c);
        table[static_cast<size_t>(2 * i)] = static_cast<float>(c);
        table[static_cast<size_t>(2 * i + 1)] = static_cast<float>(p.is_inverse ? -s : s);
      }
      for (int64_t h = 0; h < p.n_heads; ++h) {
        float* x = p.x + (t * p.n_heads + h) * p.head_dim + p.head_dim - p.rope_dim;
        for (int64_t i = 0; i < pairs; ++i) {
          const float c = table[static_cast<size_t>(2 * i)];
          const float s = table[static_cast<size_t>(2 * i + 1)];
          const float u = x[2 * i];
          const float v = x[2 * i + 1];
          x[2 * i] = u * c - v * s;
          x[2 * i + 1] = u * s + v * c;
        }
      }
    }
  });
}

}  // namespace espalier::ops
