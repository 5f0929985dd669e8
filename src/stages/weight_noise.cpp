#include "stages/weight_noise.h"

#include <cmath>
#include <cstdlib>
#include <numbers>
#include <string>

#include "base/rng.h"

namespace espalier {
namespace {

// Standard normal value i of a stream. Source: Box and Muller 1958.
double normal(const CounterRng& rng, uint64_t i) {
  const double radius = std::sqrt(-2 * std::log(1 - rng.uniform(2 * i)));
  return radius * std::cos(2 * std::numbers::pi * rng.uniform(2 * i + 1));
}

Linear noisy(const Linear& native, const Linear& pack, const WeightNoise& noise, const std::string& name, ThreadPool& pool) {
  const int64_t in = native.in(), out = native.out();
  std::vector<float> w(static_cast<size_t>(in * out)), encoded(w.size());
  native.weight_kn(pool, w.data());
  pack.weight_kn(pool, encoded.data());
  const CounterRng rng(noise.seed, name + ", draw " + std::to_string(std::abs(noise.draw)));
  const double amplitude = noise.draw < 0 ? -noise.amplitude : noise.amplitude;
  pool.parallel_for(out, 16, [&](int64_t begin, int64_t end) {
    std::vector<double> column(static_cast<size_t>(in));
    for (int64_t o = begin; o < end; ++o) {
      double square = 0, drawn = 0;
      for (int64_t i = 0; i < in; ++i) {
        const auto at = static_cast<size_t>(i * out + o);
        column[static_cast<size_t>(i)] = static_cast<double>(encoded[at]) - static_cast<double>(w[at]);
        square += column[static_cast<size_t>(i)] * column[static_cast<size_t>(i)];
      }
      double scale = amplitude;
      if (noise.shape == NoiseShape::kShaped) {
        scale *= static_cast<double>(rng.sign(static_cast<uint64_t>(o)));
      } else {
        for (int64_t i = 0; i < in; ++i) {
          const double n = normal(rng, static_cast<uint64_t>(o * in + i));
          column[static_cast<size_t>(i)] = n;
          drawn += n * n;
        }
        scale *= drawn > 0 ? std::sqrt(square / drawn) : 0;
      }
      for (int64_t i = 0; i < in; ++i) {
        float& value = w[static_cast<size_t>(i * out + o)];
        value = static_cast<float>(static_cast<double>(value) + scale * column[static_cast<size_t>(i)]);
      }
    }
  });
  return Linear::from_kn(w.data(), in, out);
}

}  // namespace

std::vector<ExpertWeights> noisy_experts(const std::vector<ExpertWeights>& native, const std::vector<ExpertWeights>& pack,
                                         const WeightNoise& noise, int layer, ThreadPool& pool) {
  std::vector<ExpertWeights> out(native.size());
  for (size_t e = 0; e < native.size(); ++e) {
    const std::string name = "layers." + std::to_string(layer) + ".experts." + std::to_string(e);
    out[e].w1 = noisy(native[e].w1, pack[e].w1, noise, name + ".w1", pool);
    out[e].w3 = noisy(native[e].w3, pack[e].w3, noise, name + ".w3", pool);
    out[e].w2 = noisy(native[e].w2, pack[e].w2, noise, name + ".w2", pool);
  }
  return out;
}

}  // namespace espalier
