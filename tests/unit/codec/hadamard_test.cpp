#include "codec/hadamard.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "base/rng.h"
#include "bench/peer/golden_cases.h"

namespace espalier::codec {
namespace {

// The definition: (-1)^popcount(r & c) / sqrt(128).
std::vector<double> dense_product(const std::vector<double>& v) {
  std::vector<double> out(128);
  for (unsigned r = 0; r < 128; ++r) {
    for (unsigned c = 0; c < 128; ++c) out[r] += (std::popcount(r & c) % 2 != 0 ? -v[c] : v[c]) * kHadamardScaleF64;
  }
  return out;
}

std::vector<double> numbers(size_t n) {
  const CounterRng rng(5, "numbers");
  std::vector<double> v(n);
  for (size_t i = 0; i < n; ++i) v[i] = rng.uniform(i) * 2 - 1;
  return v;
}

TEST(Hadamard, rows_equal_the_dense_matrix) {
  std::vector<double> a = numbers(2 * 256);
  const std::vector<double> before = a;
  hadamard_along_rows(a.data(), 2, 256);
  for (size_t chunk = 0; chunk < 4; ++chunk) {
    const std::vector<double> expected =
        dense_product({before.begin() + static_cast<long>(chunk * 128), before.begin() + static_cast<long>(chunk * 128 + 128)});
    for (size_t i = 0; i < 128; ++i) EXPECT_NEAR(a[chunk * 128 + i], expected[i], 1e-13) << chunk << " " << i;
  }
}

TEST(Hadamard, columns_equal_rows_of_the_transpose) {
  std::vector<double> a = numbers(256 * 3);
  std::vector<double> transposed(a.size());
  for (size_t r = 0; r < 256; ++r) {
    for (size_t c = 0; c < 3; ++c) transposed[c * 256 + r] = a[r * 3 + c];
  }
  hadamard_along_columns(a.data(), 256, 3);
  hadamard_along_rows(transposed.data(), 3, 256);
  for (size_t r = 0; r < 256; ++r) {
    for (size_t c = 0; c < 3; ++c) EXPECT_EQ(a[r * 3 + c], transposed[c * 256 + r]);
  }
}

TEST(Hadamard, twice_is_the_identity_in_float) {
  std::vector<float> a(128);
  const std::vector<double> start = numbers(128);
  for (size_t i = 0; i < 128; ++i) a[i] = static_cast<float>(start[i]);
  const std::vector<float> before = a;
  hadamard_along_rows(a.data(), 1, 128);
  hadamard_along_rows(a.data(), 1, 128);
  for (size_t i = 0; i < 128; ++i) EXPECT_NEAR(a[i], before[i], 16 * 0x1.0p-24) << i;  // 14 roundings of sums up to sqrt(128)
}

TEST(Hadamard, signs_equal_those_of_exllamav3) {
  const SafetensorsFile file = golden::open(golden::tree_file("codebooks_tiles.safetensors"));
  const std::vector<float> expected = golden::floats(file, "hadamard128");
  for (size_t c = 0; c < 128; ++c) {
    float unit[128] = {};
    unit[c] = 1.0f;
    hadamard128_sum(unit);
    for (size_t r = 0; r < 128; ++r) ASSERT_EQ(unit[r], expected[r * 128 + c]) << r << " " << c;
  }
}

}  // namespace
}  // namespace espalier::codec
