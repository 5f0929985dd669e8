// Random EXL3 matrices and rows for the GPU tests, and products in float64 with the weights that the CPU decodes.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/rng.h"
#include "base/thread_pool.h"
#include "codec/cuda/matrix.h"
#include "codec/exl3_tensor.h"
#include "device/stream.h"
#include "tensor/float_formats.h"

namespace espalier::codec::cuda {

inline constexpr int kAllWidths[] = {2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16};

// Every bit pattern is a valid trellis. Scales are of the size that makes outputs about as large as inputs.
inline Exl3Tensor random_tensor(int64_t k, int64_t n, int k2, Codebook codebook, const std::string& name) {
  const CounterRng rng(11, name);
  Exl3Tensor t;
  t.k = k, t.n = n, t.k2 = k2, t.codebook = codebook;
  t.trellis.resize(static_cast<size_t>(trellis_words(k, n, k2)));
  for (size_t i = 0; i + 4 <= t.trellis.size(); i += 4) {
    const uint64_t bits = rng.bits(i);
    for (size_t j = 0; j < 4; ++j) t.trellis[i + j] = static_cast<uint16_t>(bits >> (16 * j));
  }
  const CounterRng scales(12, name);
  for (int64_t i = 0; i < k; ++i) {
    t.suh.push_back(encode_f16(scales.sign(2 * i) * static_cast<float>((0.5 + scales.uniform(2 * i + 1)) / std::sqrt(double(k)))));
  }
  const CounterRng outputs(13, name);
  for (int64_t i = 0; i < n; ++i) t.svh.push_back(encode_f16(outputs.sign(2 * i) * static_cast<float>(0.5 + outputs.uniform(2 * i + 1))));
  return t;
}

// Gaussian rows with one channel in 97 thirty times larger, as residual streams have them.
inline std::vector<float> random_rows(int64_t rows, int64_t k, const std::string& name) {
  const CounterRng rng(14, name);
  std::vector<float> x(static_cast<size_t>(rows * k));
  for (size_t i = 0; i < x.size(); ++i) {
    const double g = std::sqrt(-2 * std::log(1 - rng.uniform(2 * i))) * std::cos(6.283185307179586 * rng.uniform(2 * i + 1));
    x[i] = static_cast<float>(static_cast<int64_t>(i) % k % 97 == 5 ? 30 * g : g);
  }
  return x;
}

inline std::vector<float> cpu_weight(const Exl3Tensor& t, ThreadPool& pool) {
  std::vector<float> w(static_cast<size_t>(t.k * t.n));
  decode_weight(t.view(), w.data(), pool);
  return w;
}

// y [rows, n] = x [rows, k] * w [k, n], sums in float64 over ascending k.
template <typename X>
std::vector<double> product_f64(const std::vector<X>& x, const std::vector<float>& w, int64_t k, int64_t n, ThreadPool& pool) {
  const int64_t rows = static_cast<int64_t>(x.size()) / k;
  std::vector<double> y(static_cast<size_t>(rows * n));
  pool.parallel_for(n, 64, [&](int64_t begin, int64_t end) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < k; ++i) {
        const double a = x[static_cast<size_t>(r * k + i)];
        for (int64_t o = begin; o < end; ++o) y[static_cast<size_t>(r * n + o)] += a * w[static_cast<size_t>(i * n + o)];
      }
    }
  });
  return y;
}

// |got - expected| / |expected| over a row; infinite when anything is not finite.
inline double relative_error(const float* got, const double* expected, int64_t n) {
  double error = 0, power = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (!std::isfinite(got[i])) return INFINITY;
    error += (got[i] - expected[i]) * (got[i] - expected[i]);
    power += expected[i] * expected[i];
  }
  return std::sqrt(error / power);
}

template <typename T>
T taken(Result<T> result) {
  CHECK(result.ok()) << result.error().message();
  return std::move(result).value();
}
inline void must(const Status& status) { CHECK(status.ok()) << status.message(); }

}  // namespace espalier::codec::cuda
