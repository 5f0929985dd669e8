#include "codec/int8_matmul.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "base/rng.h"
#include "codec/int8_matmul_kernels.h"
#include "codec/matmul.h"
#include "bench/peer/golden_cases.h"

namespace espalier::codec {
namespace {

constexpr int kWidths[] = {2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16};
constexpr Int8Mode kModes[] = {Int8Mode::kPlain, Int8Mode::kResidual};

Exl3Tensor random_tensor(int64_t k, int64_t n, int k2) {
  const CounterRng rng(9, "tensor");
  Exl3Tensor t;
  t.k = k;
  t.n = n;
  t.k2 = k2;
  t.trellis.resize(static_cast<size_t>(trellis_words(k, n, k2)));
  for (size_t i = 0; i < t.trellis.size(); ++i) t.trellis[i] = static_cast<uint16_t>(rng.bits(i));
  for (int64_t i = 0; i < k; ++i)
    t.suh.push_back(encode_f16(rng.sign(1000 + i) * static_cast<float>(0.1 + rng.uniform(2000 + i))));
  for (int64_t i = 0; i < n; ++i)
    t.svh.push_back(encode_f16(rng.sign(8000 + i) * static_cast<float>(0.1 + rng.uniform(9000 + i))));
  return t;
}

std::vector<float> random_rows(int64_t size, float scale = 1) {
  const CounterRng rng(10, "rows");
  std::vector<float> x(static_cast<size_t>(size));
  for (size_t i = 0; i < x.size(); ++i) x[i] = scale * static_cast<float>(rng.uniform(i) * 2 - 1);
  return x;
}

// usable_simd_tiers leaves out the reference, which is another kernel on AArch64.
std::vector<SimdTier> all_tiers() {
  std::vector<SimdTier> tiers = usable_simd_tiers();
  tiers.push_back(SimdTier::kReference);
  return tiers;
}

std::vector<float> product(const Exl3Tensor& t, const std::vector<float>& x, Int8Mode mode, SimdTier tier = best_simd_tier(),
                           int n_threads = 1) {
  ThreadPool pool(n_threads);
  const int64_t rows = static_cast<int64_t>(x.size()) / t.k;
  std::vector<float> y(static_cast<size_t>(rows * t.n));
  int8_matmul(pool, t.view(), x.data(), rows, y.data(), mode, tier);
  return y;
}

// The definition in int8_matmul.h, one element at a time: states from unpack_states, sums of bytes, int64.
std::vector<float> by_definition(const Exl3Tensor& t, const std::vector<float>& x, Int8Mode mode) {
  const int64_t k = t.k, n = t.n, rows = static_cast<int64_t>(x.size()) / k;
  std::vector<uint16_t> states(static_cast<size_t>(k * n));
  unpack_states(t.view().trellis, states.data());
  std::vector<float> xh(x.size()), z(static_cast<size_t>(rows * n)), y(z.size());
  rotate_input(t.view(), x.data(), rows, xh.data());
  const double slope = decode_f16(0x1EEE), offset = 510 * slope + 1024 * slope + decode_f16(0xC931);
  const double steps = mode == Int8Mode::kResidual ? 254 : 1;
  for (int64_t r = 0; r < rows; ++r) {
    std::vector<float> scale, shift;
    std::vector<int64_t> a(static_cast<size_t>(k));
    for (int64_t c = 0; c < k; c += 128) {
      float max = 0;
      for (int64_t i = c; i < c + 128; ++i) max = std::max(max, std::fabs(xh[static_cast<size_t>(r * k + i)]));
      const float boost = max < 0x1.0p-60f ? 0x1.0p80f : 1.0f;
      int64_t sum = 0;
      for (int64_t i = c; max > 0 && i < c + 128; ++i) {
        const float v = xh[static_cast<size_t>(r * k + i)] * boost * (127.0f / (max * boost));
        const float main = std::nearbyint(v);
        a[static_cast<size_t>(i)] = static_cast<int64_t>(steps * main + (steps > 1 ? std::nearbyint(254 * (v - main)) : 0));
        sum += a[static_cast<size_t>(i)];
      }
      scale.push_back(static_cast<float>(max / (127 * steps) * slope));
      shift.push_back(static_cast<float>(max / (127 * steps) * offset * static_cast<double>(sum)));
    }
    float start = 0;
    for (float s : shift) start += s;
    for (int64_t o = 0; o < n; ++o) {
      float& sum = z[static_cast<size_t>(r * n + o)];
      sum = start;
      for (int64_t c = 0; c < k; c += 128) {
        int64_t total = 0;
        for (int64_t i = c; i < c + 128; ++i) {
          const int64_t tile = i / 16 * (n / 16) + o / 16;
          const uint32_t p = states[static_cast<size_t>(tile * 256 + row_major_to_ring()[i % 16 * 16 + o % 16])] * 0x83DCD12Du;
          total += a[static_cast<size_t>(i)] *
                   (static_cast<int64_t>((p & 255) + (p >> 8 & 255) + (p >> 16 & 255) + (p >> 24)) - 510);
        }
        EXPECT_LT(std::abs(total), int64_t{1} << 31);
        sum = std::fma(static_cast<float>(total), scale[static_cast<size_t>(c / 128)], sum);
      }
    }
  }
  rotate_output(t.view(), z.data(), rows, y.data());
  return y;
}

// Relative rms error.
double error_of(const std::vector<float>& y, const std::vector<float>& expected) {
  double error = 0, power = 0;
  for (size_t i = 0; i < y.size(); ++i) {
    error += std::pow(double{y[i]} - double{expected[i]}, 2);
    power += std::pow(double{expected[i]}, 2);
  }
  return std::sqrt(error / power);
}

TEST(Int8Matmul, every_tier_equals_the_definition_at_every_width) {
  for (int k2 : kWidths) {
    const Exl3Tensor t = random_tensor(384, 256, k2);
    const std::vector<float> x = random_rows(5 * 384);
    for (Int8Mode mode : kModes) {
      const std::vector<float> expected = by_definition(t, x, mode);
      for (SimdTier tier : all_tiers()) {
        EXPECT_EQ(product(t, x, mode, tier), expected) << simd_tier_name(tier) << " K = " << width_text(k2);
      }
    }
  }
}

#if defined(__x86_64__)
// One of the two is this machine's choice; the other one must give the same bits where it can run.
TEST(Int8Matmul, both_avx512_kernels_equal_the_definition) {
  if (best_simd_tier() != SimdTier::kAvx512) GTEST_SKIP() << "no AVX-512";
  ThreadPool pool(1);
  for (int k2 : kWidths) {
    const Exl3Tensor t = random_tensor(256, 256, k2);
    for (int64_t rows : {1, 2, 3, 4, 5, 8, 15}) {
      const std::vector<float> x = random_rows(rows * 256);
      for (Int8Mode mode : kModes) {
        const std::vector<float> expected = by_definition(t, x, mode);
        for (const Int8Kernels* kernels : {&int8_kernels_avx512(), &int8_kernels_columns_avx512()}) {
          std::vector<float> y(expected.size());
          const Int8Job job{t.view(), x.data(), rows, y.data()};
          int8_matmul_with(*kernels, pool, std::span(&job, 1), mode);
          ASSERT_EQ(y, expected) << "K = " << width_text(k2) << ", " << rows << " rows, columns in lanes: "
                                 << (kernels == &int8_kernels_columns_avx512());
        }
      }
    }
  }
}
#endif

// Every path of the kernels: few rows as bytes or words, groups of rows, left-over rows.
TEST(Int8Matmul, every_tier_equals_the_definition_at_every_number_of_rows) {
  const Exl3Tensor t = random_tensor(256, 128, 6);
  for (int64_t rows : {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 15, 16, 17, 33}) {
    const std::vector<float> x = random_rows(rows * 256);
    for (Int8Mode mode : kModes) {
      const std::vector<float> expected = by_definition(t, x, mode);
      for (SimdTier tier : all_tiers()) {
        EXPECT_EQ(product(t, x, mode, tier), expected) << simd_tier_name(tier) << " " << rows << " rows";
      }
    }
  }
}

TEST(Int8Matmul, largest_integers_do_not_overflow) {
  // One input per chunk rotates to 128 values of one size, so |a| is 127 or 254 * 127 everywhere; a ring of zeros has sums 0.
  Exl3Tensor t = random_tensor(256, 128, 4);
  std::fill(t.suh.begin(), t.suh.end(), encode_f16(1));
  std::vector<float> x(256, 0.0f);
  x[0] = 3;
  x[128 + 37] = -5;
  for (uint16_t fill : {uint16_t{0x0000}, uint16_t{0xFFFF}, uint16_t{0x5555}}) {
    std::fill(t.trellis.begin(), t.trellis.end(), fill);
    for (Int8Mode mode : kModes) {
      const std::vector<float> expected = by_definition(t, x, mode);
      for (SimdTier tier : all_tiers()) EXPECT_EQ(product(t, x, mode, tier), expected) << simd_tier_name(tier);
    }
  }
}

TEST(Int8Matmul, a_row_does_not_depend_on_the_batch_the_threads_or_the_tier) {
  const Exl3Tensor t = random_tensor(256, 384, 5);
  const int64_t rows = 300;  // more than one group of rows
  const std::vector<float> x = random_rows(rows * 256);
  for (Int8Mode mode : kModes) {
    const std::vector<float> all = product(t, x, mode, best_simd_tier(), 1);
    EXPECT_EQ(product(t, x, mode, best_simd_tier(), 2), all);
    EXPECT_EQ(product(t, x, mode, best_simd_tier(), 3), all);
    for (int64_t first : {0, 1, 7, 100, 255, 256, 299}) {
      for (int64_t count : {1, 2, 3, 5, 16}) {
        if (first + count > rows) continue;
        const std::vector<float> part(x.begin() + first * 256, x.begin() + (first + count) * 256);
        const std::vector<float> expected(all.begin() + first * 384, all.begin() + (first + count) * 384);
        ASSERT_EQ(product(t, part, mode), expected) << first << " " << count;
      }
    }
  }
}

TEST(Int8Matmul, a_ragged_list_of_jobs_equals_single_calls) {
  std::vector<Exl3Tensor> tensors;
  std::vector<std::vector<float>> inputs;
  const int64_t shapes[][3] = {{128, 256, 1}, {256, 128, 3}, {384, 384, 0}, {128, 128, 17},
                               {512, 128, 2}, {128, 640, 5}, {256, 256, 4}};
  for (size_t j = 0; j < std::size(shapes); ++j) {
    tensors.push_back(random_tensor(shapes[j][0], shapes[j][1], kWidths[(2 * j + 1) % std::size(kWidths)]));
    inputs.push_back(random_rows(shapes[j][2] * shapes[j][0], static_cast<float>(j + 1)));
  }
  for (Int8Mode mode : kModes) {
    for (int n_threads : {1, 2, 3}) {
      ThreadPool pool(n_threads);
      std::vector<std::vector<float>> outputs;
      std::vector<Int8Job> jobs;
      for (size_t j = 0; j < tensors.size(); ++j) outputs.emplace_back(static_cast<size_t>(shapes[j][2] * shapes[j][1]));
      for (size_t j = 0; j < tensors.size(); ++j)
        jobs.push_back({tensors[j].view(), inputs[j].data(), shapes[j][2], outputs[j].data()});
      int8_matmul(pool, jobs, mode);
      for (size_t j = 0; j < tensors.size(); ++j) EXPECT_EQ(outputs[j], product(tensors[j], inputs[j], mode)) << j;
    }
  }
}

TEST(Int8Matmul, zero_rows_huge_and_tiny_ones) {
  const Exl3Tensor t = random_tensor(256, 128, 6);
  std::vector<float> x;
  const float scales[] = {0, 1, 1e30f, 1e-30f, 1e-33f, 1e-37f};
  for (float s : scales) {
    const std::vector<float> row = random_rows(256, s);
    x.insert(x.end(), row.begin(), row.end());
  }
  for (Int8Mode mode : kModes) {
    const std::vector<float> y = product(t, x, mode);
    EXPECT_EQ(y, by_definition(t, x, mode));
    const double bound = mode == Int8Mode::kPlain ? 0.02 : 1e-3;
    for (size_t r = 0; r + 1 < std::size(scales); ++r) {  // the scale of the last is a subnormal of a few bits
      const std::vector<float> row(y.begin() + static_cast<long>(r) * 128, y.begin() + static_cast<long>(r + 1) * 128);
      if (r == 0) {
        for (float v : row) EXPECT_EQ(v, 0.0f);
        continue;
      }
      std::vector<float> scaled;  // row 1 is the row of scale 1
      for (int c = 0; c < 128; ++c) scaled.push_back(y[static_cast<size_t>(128 + c)] * scales[r]);
      EXPECT_LT(error_of(row, scaled), bound) << "scale " << scales[r];
    }
  }
}

TEST(Int8Matmul, a_row_that_is_not_finite_gives_nan_and_harms_no_other) {
  const Exl3Tensor t = random_tensor(256, 128, 4);
  const std::vector<float> clean = random_rows(4 * 256);
  const float bad[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                       -std::numeric_limits<float>::infinity(), std::numeric_limits<float>::max()};
  for (Int8Mode mode : kModes) {
    const std::vector<float> expected = product(t, clean, mode);
    for (float v : bad) {
      std::vector<float> x = clean;
      x[256 + 130] = v;
      if (std::isfinite(v)) {
        for (int i = 128; i < 256; ++i) x[static_cast<size_t>(256 + i)] = v;  // the rotation overflows
      }
      for (SimdTier tier : all_tiers()) {
        const std::vector<float> y = product(t, x, mode, tier);
        for (size_t i = 0; i < y.size(); ++i) {
          if (i / 128 == 1) {
            EXPECT_EQ(std::bit_cast<uint32_t>(y[i]), std::bit_cast<uint32_t>(std::numeric_limits<float>::quiet_NaN())) << i;
          } else {
            EXPECT_EQ(y[i], expected[i]) << i;
          }
        }
      }
    }
  }
}

TEST(Int8Matmul, only_mul1_is_a_sum_of_bytes) {
  Exl3Tensor t = random_tensor(128, 128, 4);
  EXPECT_TRUE(has_int8_matmul(t.view()));
  t.codebook = Codebook::kMcg;
  EXPECT_FALSE(has_int8_matmul(t.view()));
  t.codebook = Codebook::k3Inst;
  EXPECT_FALSE(has_int8_matmul(t.view()));
}

// Rounding noise of the quantized activations, d / sqrt(12) per input, passes through the rotations like the inputs themselves,
// so the relative error expected is rms(d) / sqrt(12) / rms(xh); the rest is the codebook's rounding to fp16, at most 2^-11 of
// a value.
double expected_error(const Exl3Tensor& t, const std::vector<float>& x, Int8Mode mode) {
  const int64_t rows = static_cast<int64_t>(x.size()) / t.k;
  std::vector<float> xh(x.size());
  rotate_input(t.view(), x.data(), rows, xh.data());
  double noise = 0, power = 0;
  for (size_t c = 0; c < xh.size(); c += 128) {
    double max = 0;
    for (size_t i = c; i < c + 128; ++i) {
      max = std::max(max, std::fabs(double{xh[i]}));
      power += std::pow(double{xh[i]}, 2);
    }
    noise += 128 * std::pow(max / 127 / (mode == Int8Mode::kResidual ? 254 : 1), 2) / 12;
  }
  return std::sqrt(noise / power + std::pow(0x1.0p-11, 2) / 3);
}

TEST(Int8Matmul, golden_outputs_are_reached_within_the_rounding_noise) {
  const SafetensorsFile file = golden::open(golden::tree_file("mul1_128.safetensors"));
  for (const std::string& name : golden::linears(file)) {
    const Exl3Tensor t = golden::load(file, name);
    const std::vector<float> x = golden::floats(file, name + ".x");
    const std::vector<float> expected = golden::floats(file, name + ".y_ref");
    const double plain = error_of(product(t, x, Int8Mode::kPlain), expected);
    const double residual = error_of(product(t, x, Int8Mode::kResidual), expected);
    EXPECT_LT(plain, 1.5 * expected_error(t, x, Int8Mode::kPlain)) << name;  // 5 rows of 128: noise of few samples
    EXPECT_LT(residual, 1.5 * expected_error(t, x, Int8Mode::kResidual)) << name;
    EXPECT_LT(residual, 1e-3) << name;
  }
}

// y_int8 and y_int8r are exllamav3's integer products of the same rows, with one scale per row.
TEST(Int8Matmul, golden_outputs_are_closer_than_exllamav3s_integer_products) {
  if (!std::filesystem::exists(golden::shared_file("mul1_larger.safetensors"))) {
    std::printf("the larger golden files are not in %s\n", golden::shared_file("").c_str());
    return;
  }
  int cases = 0;
  for (const char* file_name : {"mul1_larger.safetensors", "other_and_special.safetensors"}) {
    const SafetensorsFile file = golden::open(golden::shared_file(file_name));
    for (const std::string& name : golden::linears(file)) {
      if (file.find(name + ".y_int8") == nullptr) continue;
      ++cases;
      const Exl3Tensor t = golden::load(file, name);
      const std::vector<float> x = golden::floats(file, name + ".x");
      const std::vector<float> expected = golden::floats(file, name + ".y_ref");
      const double plain = error_of(product(t, x, Int8Mode::kPlain), expected);
      const double residual = error_of(product(t, x, Int8Mode::kResidual), expected);
      EXPECT_LT(plain, error_of(golden::floats(file, name + ".y_int8"), expected)) << name;
      EXPECT_LT(residual, 1.05 * error_of(golden::floats(file, name + ".y_int8r"), expected)) << name;
    }
  }
  EXPECT_EQ(cases, 4);
}

}  // namespace
}  // namespace espalier::codec
