#include "codec/block_ldl.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <limits>

#include "base/rng.h"
#include "codec/trellis.h"
#include "bench/peer/golden_cases.h"

namespace espalier::codec {
namespace {

// X^T X of random rows plus a small diagonal: symmetric positive definite.
std::vector<double> random_hessian(int64_t n, uint64_t seed) {
  const CounterRng rng(seed, "hessian");
  std::vector<float> x(static_cast<size_t>(2 * n * n));
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(rng.uniform(i) - 0.5);
  std::vector<double> h = golden::hessian_of(x, n);
  for (int64_t i = 0; i < n; ++i) h[static_cast<size_t>(i * n + i)] += 0.01;
  return h;
}

TEST(BlockLdl, cholesky_multiplies_back) {
  const int64_t n = 144;  // more than two panels, the last one short
  const std::vector<double> h = random_hessian(n, 1);
  std::vector<double> u = h;
  ThreadPool pool(1);
  ASSERT_TRUE(cholesky_upper(u.data(), n, pool));
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = i; j < n; ++j) {
      double sum = 0;
      for (int64_t p = 0; p <= i; ++p) sum += u[static_cast<size_t>(p * n + i)] * u[static_cast<size_t>(p * n + j)];
      ASSERT_NEAR(sum, h[static_cast<size_t>(i * n + j)], 1e-13) << i << " " << j;
    }
  }
}

TEST(BlockLdl, solve_satisfies_the_system) {
  const int64_t n = 80;
  const std::vector<double> h = random_hessian(n, 2);
  std::vector<double> u = h;
  ThreadPool pool(1);
  ASSERT_TRUE(cholesky_upper(u.data(), n, pool));
  std::vector<double> x(static_cast<size_t>(n));
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<double>(i));
  const std::vector<double> wanted = x;
  solve_cholesky(u.data(), n, x.data());
  for (int64_t i = 0; i < n; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < n; ++j) sum += h[static_cast<size_t>(i * n + j)] * x[static_cast<size_t>(j)];
    EXPECT_NEAR(sum, wanted[static_cast<size_t>(i)], 1e-11) << i;
  }
}

TEST(BlockLdl, indefinite_and_non_finite_matrices_are_told) {
  ThreadPool pool(1);
  std::vector<double> a(32 * 32);
  for (size_t i = 0; i < 32; ++i) a[i * 32 + i] = i == 20 ? -1.0 : 1.0;
  EXPECT_FALSE(cholesky_upper(a.data(), 32, pool));
  for (size_t i = 0; i < 32; ++i) a[i * 32 + i] = i == 3 ? std::numeric_limits<double>::quiet_NaN() : 1.0;
  EXPECT_FALSE(cholesky_upper(a.data(), 32, pool));
}

// With L from the feedback blocks, L^-1 H L^-T must be block diagonal.
TEST(BlockLdl, feedback_removes_everything_outside_the_diagonal_blocks) {
  const int64_t n = 64;
  const std::vector<double> h = random_hessian(n, 3);
  std::vector<double> u = h;
  ThreadPool pool(2);
  ASSERT_TRUE(cholesky_upper(u.data(), n, pool));
  const std::vector<double> feedback = block_ldl_feedback(u.data(), n, pool);
  std::vector<double> l(static_cast<size_t>(n * n));
  for (int64_t r = 0; r < n; ++r) {
    l[static_cast<size_t>(r * n + r)] = 1.0;
    for (int64_t c = 0; c < r / kTile * kTile; ++c) {
      l[static_cast<size_t>(r * n + c)] = feedback[static_cast<size_t>(c * n + r)];
    }
  }
  std::vector<double> d = h;
  for (int64_t side = 0; side < 2; ++side) {  // forward substitution on the rows, then on the rows of the transpose
    for (int64_t r = 0; r < n; ++r) {
      for (int64_t p = 0; p < r; ++p) {
        for (int64_t c = 0; c < n; ++c) d[static_cast<size_t>(r * n + c)] -= l[static_cast<size_t>(r * n + p)] * d[static_cast<size_t>(p * n + c)];
      }
    }
    std::vector<double> t(d.size());
    for (int64_t r = 0; r < n; ++r) {
      for (int64_t c = 0; c < n; ++c) t[static_cast<size_t>(c * n + r)] = d[static_cast<size_t>(r * n + c)];
    }
    d = t;
  }
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t c = 0; c < n; ++c) {
      if (r / kTile != c / kTile) {
        EXPECT_NEAR(d[static_cast<size_t>(r * n + c)], 0.0, 1e-12) << r << " " << c;
      }
    }
  }
}

TEST(BlockLdl, threads_do_not_change_bits) {
  const int64_t n = 256;
  const std::vector<double> h = random_hessian(n, 4);
  ThreadPool one(1), three(3);
  std::vector<double> a = h, b = h;
  ASSERT_TRUE(cholesky_upper(a.data(), n, one));
  ASSERT_TRUE(cholesky_upper(b.data(), n, three));
  EXPECT_EQ(a, b);
  EXPECT_EQ(block_ldl_feedback(a.data(), n, one), block_ldl_feedback(b.data(), n, three));
}

TEST(BlockLdl, factor_of_exllamav3s_rotated_hessian_agrees) {
  const std::filesystem::path path = golden::shared_file("mul1_larger.safetensors");
  if (!std::filesystem::exists(path)) {
    std::printf("%s is not here; the factor was checked against identities only\n", path.c_str());
    return;
  }
  const SafetensorsFile file = golden::open(path);
  const std::vector<float> h_r = golden::floats(file, "mul1_256x384_k3.H_r");
  const std::vector<float> expected = golden::floats(file, "mul1_256x384_k3.L");
  const int64_t n = 256;
  std::vector<double> u(h_r.begin(), h_r.end());
  ThreadPool pool(1);
  ASSERT_TRUE(cholesky_upper(u.data(), n, pool));
  const std::vector<double> feedback = block_ldl_feedback(u.data(), n, pool);
  double error = 0;
  double power = 0;
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t c = 0; c < n; ++c) {
      const double mine = r / kTile > c / kTile ? feedback[static_cast<size_t>(c * n + r)] : 0.0;
      const double theirs = expected[static_cast<size_t>(r * n + c)];
      error += (mine - theirs) * (mine - theirs);
      power += theirs * theirs;
    }
  }
  EXPECT_LT(std::sqrt(error / power), 3e-5);  // theirs is fp32 with a Cholesky and an inverse per block
}

}  // namespace
}  // namespace espalier::codec
