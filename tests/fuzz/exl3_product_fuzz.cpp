// module: codec
// mutations: 2000
// Products with an EXL3 linear of any bytes and rows of any bits: every tier gives the same bits, a row does not depend
// on its batch or on how jobs are put together, and the products agree with the decoded weight within their bounds.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "base/check.h"
#include "codec/int8_matmul_kernels.h"
#include "codec/matmul.h"
#include "exl3_bytes.h"
#include "tensor/float_formats.h"

namespace {

using namespace espalier;
using namespace espalier::codec;

constexpr double kLargestValue = 8;  // of the codebooks, generously

// The bits of a NaN are the implementation's own.
bool same(float a, float b) {
  return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b));
}

void check_same(const std::vector<float>& a, const std::vector<float>& b, const std::string& what) {
  for (size_t i = 0; i < a.size(); ++i) CHECK(same(a[i], b[i])) << what << " [" << i << "]: " << a[i] << ", " << b[i];
}

// Rows of small numbers, or of any bits at all.
std::vector<float> make_rows(const uint8_t* data, size_t size, int64_t count, bool any_bits) {
  std::vector<float> x(static_cast<size_t>(count));
  for (size_t i = 0; i < x.size(); ++i) {
    uint8_t bytes[4];
    for (size_t b = 0; b < 4; ++b) bytes[b] = data[(7 * i + 3 * b + 11) % size];
    if (any_bits) {
      std::memcpy(&x[i], bytes, sizeof bytes);
    } else {
      x[i] = static_cast<float>(static_cast<int8_t>(bytes[0])) / 16;
    }
  }
  return x;
}

// How far a product may be from x times the decoded weight: rounding of sums of k terms, or of activations to `steps` a
// chunk. The first factor is the column's; negative when fp32 may overflow on the way.
double bound_of(const Exl3View& view, const float* x, double steps) {
  double power = 0;
  for (int64_t i = 0; i < view.k(); ++i) power += std::pow(double{x[i]} * decode_f16(view.suh[i]), 2);
  if (!(power < 1e60)) return -1;
  const double k = static_cast<double>(view.k());
  const double sum = std::sqrt(k * power) * kLargestValue;  // bounds |xh|_1 times a value
  return std::sqrt(128.0) * (sum * ((k + 30) * 0x1.0p-23 + (steps > 0 ? 0x1.0p-10 : 0)) +
                             (steps > 0 ? k * std::sqrt(power) / steps * kLargestValue : 0)) +
         1e-30;
}

void check_near(const Exl3View& view, const std::vector<float>& weight, const std::vector<float>& x,
                const std::vector<float>& y, double steps, const char* what) {
  const int64_t rows = static_cast<int64_t>(x.size()) / view.k();
  for (int64_t r = 0; r < rows; ++r) {
    const double bound = bound_of(view, x.data() + r * view.k(), steps);
    for (int64_t j = 0; bound >= 0 && j < view.n(); ++j) {
      double sum = 0;
      for (int64_t i = 0; i < view.k(); ++i) {
        sum += double{x[static_cast<size_t>(r * view.k() + i)]} * double{weight[static_cast<size_t>(i * view.n() + j)]};
      }
      const double limit = bound * (std::fabs(double{decode_f16(view.svh[j])}) + 1e-30);
      CHECK(std::fabs(sum - double{y[static_cast<size_t>(r * view.n() + j)]}) <= limit)
          << what << " row " << r << " column " << j << ": " << y[static_cast<size_t>(r * view.n() + j)]
          << ", expected " << sum << " within " << limit;
    }
  }
}

std::vector<float> exact(ThreadPool& pool, const Exl3View& view, const float* x, int64_t rows, SimdTier tier) {
  std::vector<float> y(static_cast<size_t>(rows * view.n()));
  exl3_matmul(pool, view, x, rows, y.data(), tier);
  return y;
}

std::vector<float> integer(ThreadPool& pool, const Exl3View& view, const float* x, int64_t rows, Int8Mode mode,
                           SimdTier tier) {
  std::vector<float> y(static_cast<size_t>(rows * view.n()));
  int8_matmul(pool, view, x, rows, y.data(), mode, tier);
  return y;
}

void check_integer(ThreadPool& pool, const Exl3View& view, const std::vector<float>& x, int64_t rows, int64_t cut,
                   const std::vector<float>& weight) {
  for (Int8Mode mode : {Int8Mode::kPlain, Int8Mode::kResidual}) {
    const std::vector<float> y = integer(pool, view, x.data(), rows, mode, SimdTier::kReference);
    for (SimdTier tier : usable_simd_tiers()) {
      check_same(integer(pool, view, x.data(), rows, mode, tier), y, std::string(simd_tier_name(tier)));
    }
#if defined(__x86_64__)
    if (best_simd_tier() == SimdTier::kAvx512) {
      for (const Int8Kernels* kernels : {&int8_kernels_avx512(), &int8_kernels_columns_avx512()}) {
        std::vector<float> other(y.size());
        const Int8Job job{view, x.data(), rows, other.data()};
        int8_matmul_with(*kernels, pool, std::span(&job, 1), mode);
        check_same(other, y, "AVX-512 kernels");
      }
    }
#endif
    std::vector<float> parts(y.size());  // the same rows as two jobs
    const Int8Job jobs[] = {{view, x.data(), cut, parts.data()},
                            {view, x.data() + cut * view.k(), rows - cut, parts.data() + cut * view.n()}};
    int8_matmul(pool, jobs, mode);
    check_same(parts, y, "two jobs");
    check_near(view, weight, x, y, mode == Int8Mode::kPlain ? 127 : 127 * 254, "integer product");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::LinearBytes bytes;
  if (!fuzz::make_linear(data, size, &bytes)) return 0;
  const Result<Exl3Tensor> tensor = load_exl3("fuzz", bytes.parts);
  if (!tensor.ok()) return 0;
  const Exl3View view = tensor->view();
  if (view.k() == 0 || view.n() == 0) return 0;
  ThreadPool pool(1);
  std::vector<float> weight(static_cast<size_t>(view.k() * view.n()));
  decode_weight(view, weight.data(), pool);

  const int64_t rows = 1 + data[5] % 11;
  const int64_t cut = data[6] % (rows + 1);
  const std::vector<float> x = make_rows(data, size, rows * view.k(), (data[7] & 1) != 0);
  const std::vector<float> y = exact(pool, view, x.data(), rows, SimdTier::kReference);
  for (SimdTier tier : usable_simd_tiers()) {
    check_same(exact(pool, view, x.data(), rows, tier), y, std::string(simd_tier_name(tier)));
  }
  std::vector<float> parts = exact(pool, view, x.data(), cut, active_simd_tier());
  const std::vector<float> rest = exact(pool, view, x.data() + cut * view.k(), rows - cut, active_simd_tier());
  parts.insert(parts.end(), rest.begin(), rest.end());
  check_same(parts, y, "rows in two calls");
  check_near(view, weight, x, y, 0, "exact product");
  if (has_int8_matmul(view)) check_integer(pool, view, x, rows, cut, weight);
  return 0;
}
