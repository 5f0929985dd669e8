#include "bench/exl3_ablation/samples.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/rng.h"
#include "bench/peer/golden_cases.h"
#include "codec/quantizer.h"
#include "codec/strip_product.h"

namespace espalier::ablation {
namespace {

constexpr int64_t kSize = 512;
constexpr int kRank = 16;

double gaussian(const CounterRng& rng, int64_t index) {
  const auto i = static_cast<uint64_t>(index);
  return std::sqrt(-2 * std::log(1 - rng.uniform(2 * i))) * std::cos(6.283185307179586 * rng.uniform(2 * i + 1));
}

// X^T X / rows for rows of rank 16 plus noise, channels scaled by `channel`.
std::vector<double> synthetic_hessian(int64_t rows, const std::vector<double>& channel, const std::string& name,
                                      ThreadPool& pool) {
  const CounterRng basis(3, "synthetic basis");
  const CounterRng rng(4, name);
  std::vector<double> factors(static_cast<size_t>(kSize * kRank));
  for (int64_t i = 0; i < kSize * kRank; ++i) factors[static_cast<size_t>(i)] = 0.5 * gaussian(basis, i);
  std::vector<double> x(static_cast<size_t>(rows * kSize)), transposed(x.size());
  pool.parallel_for(rows, 64, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      double z[kRank];
      for (int q = 0; q < kRank; ++q) z[q] = gaussian(rng, r * (kSize + kRank) + q);
      for (int64_t i = 0; i < kSize; ++i) {
        double v = gaussian(rng, r * (kSize + kRank) + kRank + i);
        for (int q = 0; q < kRank; ++q) v += z[q] * factors[static_cast<size_t>(i * kRank + q)];
        x[static_cast<size_t>(r * kSize + i)] = v * channel[static_cast<size_t>(i)];
        transposed[static_cast<size_t>(i * rows + r)] = x[static_cast<size_t>(r * kSize + i)];
      }
    }
  });
  std::vector<double> h(static_cast<size_t>(kSize * kSize));
  pool.parallel_for(kSize / codec::kStripWidth, 1, [&](int64_t begin, int64_t end) {
    std::vector<double> strip(static_cast<size_t>(rows * codec::kStripWidth));
    for (int64_t s = begin; s < end; ++s) {
      for (int64_t r = 0; r < rows; ++r) {
        std::copy_n(x.data() + r * kSize + s * codec::kStripWidth, codec::kStripWidth,
                    strip.data() + r * codec::kStripWidth);
      }
      codec::StripProduct p;
      p.a = transposed.data();
      p.a_stride = rows;
      p.strip = strip.data();
      p.out = h.data() + s * codec::kStripWidth;
      p.out_stride = kSize;
      p.rows = kSize;
      p.cols = rows;
      codec::strip_product(p, active_simd_tier());
    }
  });
  for (double& v : h) v /= static_cast<double>(rows);
  return h;
}

}  // namespace

std::vector<Sample> golden_samples(const std::filesystem::path& path, int n_seeds, ThreadPool& pool) {
  std::vector<Sample> samples;
  const SafetensorsFile file = codec::golden::open(path);
  for (codec::golden::Case& c : codec::golden::cases(file)) {
    if (c.hessian.empty()) continue;
    Sample s;
    s.group = "golden";
    s.name = c.name;
    s.k = c.k;
    s.n = c.n;
    s.k2 = c.k2;
    s.codebook = c.codebook;
    s.weight = std::move(c.weight);
    s.hessian = std::move(c.hessian);
    s.n_seeds = n_seeds;
    s.recorded = codec::measure_error(s.weight.data(), c.decoded.data(), s.k, s.n, s.hessian.data(), pool).true_error;
    samples.push_back(std::move(s));
  }
  return samples;
}

std::vector<Sample> synthetic_samples(const Spread& shape, const std::vector<int>& k2, ThreadPool& pool) {
  char text[64];
  std::snprintf(text, sizeof text, "512x512 %.1f/%.1f/%.1f", shape.row, shape.column, shape.channel);
  const CounterRng rng(5, text);
  std::vector<double> rows, columns, channels;
  for (int64_t i = 0; i < kSize; ++i) {
    const double a = gaussian(rng, i);
    const double b = gaussian(rng, kSize + i);
    const double c = shape.correlation * a + std::sqrt(1 - shape.correlation * shape.correlation) * b;
    rows.push_back(std::exp(shape.row * a));
    channels.push_back(std::exp(shape.channel * c));
    columns.push_back(std::exp(shape.column * gaussian(rng, 2 * kSize + i)));
  }
  Sample s;
  s.group = s.name = text;
  s.k = s.n = kSize;
  for (int64_t i = 0; i < kSize * kSize; ++i) {
    const double scale = rows[static_cast<size_t>(i / kSize)] * columns[static_cast<size_t>(i % kSize)];
    s.weight.push_back(static_cast<float>(0.02 * gaussian(rng, 3 * kSize + i) * scale));
  }
  s.hessian = synthetic_hessian(2048, channels, "fit", pool);
  s.held_out = synthetic_hessian(8192, channels, "held out", pool);
  std::vector<Sample> samples;
  for (int width : k2) {
    s.k2 = width;
    samples.push_back(s);
  }
  return samples;
}

}  // namespace espalier::ablation
