// Gaussian tiles, and what the search makes of them as if there were infinitely many, with the sampling error said.
#pragma once

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

#include "base/rng.h"
#include "codec/viterbi.h"

namespace espalier::codec::gaussian {

// Box-Muller, two numbers of the generator for each.
inline double number(const CounterRng& rng, uint64_t i) {
  return std::sqrt(-2 * std::log(1 - rng.uniform(2 * i))) * std::cos(2 * std::numbers::pi * rng.uniform(2 * i + 1));
}

inline std::vector<float> tiles(int64_t n_tiles, double spread, uint64_t seed) {
  const CounterRng rng(seed, "gaussian tiles");
  std::vector<float> values(static_cast<size_t>(n_tiles * kTileSize));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(number(rng, i) * spread);
  return values;
}

struct Estimate {
  double mean = 0;            // squared error per unit of variance
  double standard_error = 0;  // of that mean
  double deviation = 0;       // of one tile drawn at random: a plain mean of n tiles is off by deviation / sqrt(n)
};

// From K = 5 on, few values beyond the ends of the codebook decide: in plain samples of any affordable size their number is left to
// luck. Here tiles without and with such values are drawn apart and weighted by their probabilities, which are known. Within each
// kind, the power of the values inside and the excess of those outside are regressed out: their expectations are known too.
class Source {
 public:
  Source(Codebook codebook, double spread, uint64_t seed) : codebook_(codebook), spread_(spread), rng_(seed, "gaussian source") {
    const float* values = codebook_table_f32(codebook);
    low_ = *std::min_element(values, values + kNStates) / spread;
    high_ = *std::max_element(values, values + kNStates) / spread;
    above_ = std::erfc(high_ / std::numbers::sqrt2) / 2;
    below_ = std::erfc(-low_ / std::numbers::sqrt2) / 2;
    const auto density = [](double z) { return std::exp(-z * z / 2) / std::sqrt(2 * std::numbers::pi); };
    inside_power_ = 1 - (high_ * density(high_) - low_ * density(low_)) / (1 - above_ - below_);
    const auto beyond = [&](double a, double tail) { return (1 + a * a) * tail - a * density(a); };  // E max(0, z - a)^2
    overload_ = (beyond(high_, above_) + beyond(-low_, below_)) / (above_ + below_);
  }

  double probability_outside() const { return 1 - std::pow(1 - above_ - below_, kTileSize); }  // of a tile, one value at least

  // Half of the tiles with all values inside, then half with at least one outside.
  std::vector<float> draw(int64_t n_tiles) {
    std::vector<float> out;
    for (int64_t t = 0; t < n_tiles; ++t) {
      bool is_outside[kTileSize] = {};
      if (t >= n_tiles / 2) {
        // The first outside value is at p with the probability of a geometric law cut off at the tile's end; later ones are free.
        const double p_out = above_ + below_;
        const double u = uniform() * probability_outside();
        const int first = std::min(static_cast<int>(std::log1p(-u) / std::log1p(-p_out)), kTileSize - 1);
        is_outside[first] = true;
        for (int p = first + 1; p < kTileSize; ++p) is_outside[p] = uniform() < p_out;
      }
      for (bool outside : is_outside) out.push_back(static_cast<float>((outside ? tail() : inside()) * spread_));
    }
    return out;
  }

  // For tiles of draw() and what the search found.
  Estimate relative_error(const std::vector<float>& tiles, const std::vector<uint16_t>& states) const {
    const size_t n = tiles.size() / kTileSize / 2;
    const double weight[2] = {1 - probability_outside(), probability_outside()};
    Estimate e;
    double plain_mean = 0, plain_square = 0;
    for (size_t kind = 0; kind < 2; ++kind) {
      double mean[3] = {}, c[3][3] = {};  // error, power inside, overload; the last two less their expectations
      for (size_t t = kind * n; t < (kind + 1) * n; ++t) {
        double row[3] = {};
        row[0] = tile_error(tiles.data() + t * kTileSize, states.data() + t * kTileSize, codebook_) / (spread_ * spread_ * kTileSize);
        for (size_t p = t * kTileSize; p < (t + 1) * kTileSize; ++p) {
          const double z = tiles[p] / spread_;
          if (z >= low_ && z <= high_) {
            row[1] += z * z - inside_power_;
          } else {
            row[2] += (z < low_ ? (low_ - z) * (low_ - z) : (z - high_) * (z - high_)) - overload_;
          }
        }
        for (int a = 0; a < 3; ++a) mean[a] += row[a] / static_cast<double>(n);
        for (int a = 0; a < 3; ++a) {
          for (int b = 0; b < 3; ++b) c[a][b] += row[a] * row[b] / static_cast<double>(n);
        }
      }
      for (int a = 0; a < 3; ++a) {
        for (int b = 0; b < 3; ++b) c[a][b] -= mean[a] * mean[b];
      }
      plain_mean += weight[kind] * mean[0];
      plain_square += weight[kind] * (c[0][0] + mean[0] * mean[0]);
      const double determinant = c[1][1] * c[2][2] - c[1][2] * c[1][2];
      const double power_slope = kind == 0 ? c[0][1] / c[1][1] : (c[0][1] * c[2][2] - c[0][2] * c[1][2]) / determinant;
      const double overload_slope = kind == 0 ? 0 : (c[0][2] * c[1][1] - c[0][1] * c[1][2]) / determinant;
      e.mean += weight[kind] * (mean[0] - power_slope * mean[1] - overload_slope * mean[2]);
      const double residual = c[0][0] - power_slope * c[0][1] - overload_slope * c[0][2];
      e.standard_error += weight[kind] * weight[kind] * residual / static_cast<double>(n - 3);
    }
    e.standard_error = std::sqrt(e.standard_error);
    e.deviation = std::sqrt(plain_square - plain_mean * plain_mean);
    return e;
  }

 private:
  double uniform() { return rng_.uniform(next_++); }
  double inside() {
    for (;;) {
      const double radius = std::sqrt(-2 * std::log(1 - uniform()));
      const double z = radius * std::cos(2 * std::numbers::pi * uniform());
      if (z >= low_ && z <= high_) return z;
    }
  }
  // Marsaglia's method for the tail beyond a: propose with density z exp(-(z^2 - a^2) / 2), accept with a / z.
  double tail() {
    const bool is_above = uniform() * (above_ + below_) < above_;
    const double a = is_above ? high_ : -low_;
    for (;;) {
      const double z = std::sqrt(a * a - 2 * std::log(1 - uniform()));
      if (uniform() * z <= a) return is_above ? z : -z;
    }
  }

  Codebook codebook_;
  double spread_;
  CounterRng rng_;
  uint64_t next_ = 0;
  double low_ = 0, high_ = 0;       // ends of the codebook
  double above_ = 0, below_ = 0;    // probabilities
  double inside_power_ = 0;         // mean square of the values between the ends
  double overload_ = 0;             // mean square of the excess of the others
};

}  // namespace espalier::codec::gaussian
