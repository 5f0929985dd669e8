#include "codec/column_encoder.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "base/rng.h"
#include "codec/block_ldl.h"
#include "codec/strip_product.h"

namespace espalier::codec {
namespace {

constexpr int64_t kK = 64, kN = 48;

// A random positive definite metric, its feedback and its blocks.
SideMetric random_side(int64_t size, const std::string& name, ThreadPool& pool) {
  const CounterRng rng(1, name);
  std::vector<double> x(static_cast<size_t>(size * size));
  for (size_t i = 0; i < x.size(); ++i) x[i] = rng.uniform(i) - 0.3;  // a common part: far from diagonal
  SideMetric side;
  side.size = size;
  side.metric.resize(x.size());
  for (int64_t i = 0; i < size; ++i) {
    for (int64_t j = 0; j < size; ++j) {
      double sum = i == j ? 0.2 : 0.0;
      for (int64_t r = 0; r < size; ++r)
        sum += x[static_cast<size_t>(r * size + i)] * x[static_cast<size_t>(r * size + j)] / static_cast<double>(size);
      side.metric[static_cast<size_t>(i * size + j)] = sum;
    }
  }
  std::vector<double> factor = side.metric;
  EXPECT_TRUE(cholesky_upper(factor.data(), size, pool));
  side.feedback = block_ldl_feedback(factor.data(), size, pool);
  prepare_descent(&side);
  return side;
}

struct Case {
  std::vector<double> weight;
  SideMetric input, output;
  ColumnProblem problem;

  explicit Case(ThreadPool& pool)
      : weight(static_cast<size_t>(kK * kN)), input(random_side(kK, "in", pool)), output(random_side(kN, "out", pool)) {
    const CounterRng rng(2, "weight");
    for (size_t i = 0; i < weight.size(); ++i) {
      weight[i] = 0.9 *
                  (rng.uniform(4 * i) + rng.uniform(4 * i + 1) + rng.uniform(4 * i + 2) + rng.uniform(4 * i + 3) - 2) *
                  std::sqrt(3.0);
    }
    problem.weight = weight.data();
    problem.k = kK;
    problem.n = kN;
    problem.width = kN;
    problem.input = &input;
    problem.output = &output;
    problem.search.k2 = 6;
  }
};

Exl3Tensor encode(const ColumnProblem& problem, ThreadPool& pool) {
  Exl3Tensor tensor;
  tensor.k = problem.k;
  tensor.n = problem.n;
  tensor.k2 = problem.search.k2;
  tensor.trellis.assign(static_cast<size_t>(trellis_words(tensor.k, tensor.n, tensor.k2)), 0);
  encode_columns(problem, tensor, pool);
  return tensor;
}

std::vector<double> error_of(const Case& c, const Exl3Tensor& tensor) {
  std::vector<float> inner(c.weight.size());
  decode_inner({tensor.trellis.data(), kK, kN, tensor.k2, Codebook::kMul1}, inner.data());
  std::vector<double> error = c.weight;
  for (size_t i = 0; i < error.size(); ++i) error[i] -= double{inner[i]};
  return error;
}

// tr(E^T H E G) by plain loops; G null: identity.
double objective(const std::vector<double>& e, const std::vector<double>& h, const std::vector<double>* g) {
  double sum = 0;
  for (int64_t a = 0; a < kK; ++a) {
    for (int64_t j = 0; j < kN; ++j) {
      double he = 0, eg = 0;
      for (int64_t b = 0; b < kK; ++b) he += h[static_cast<size_t>(a * kK + b)] * e[static_cast<size_t>(b * kN + j)];
      for (int64_t l = 0; l < kN; ++l)
        eg += (g == nullptr ? (j == l ? 1.0 : 0.0) : (*g)[static_cast<size_t>(j * kN + l)]) *
              e[static_cast<size_t>(a * kN + l)];
      sum += he * eg;
    }
  }
  return sum;
}

// Unit block-triangular L with a = L D L^T, 16x16 blocks, by eliminating block columns: independent of the Cholesky
// route.
std::vector<double> block_triangular(std::vector<double> a, int64_t n) {
  std::vector<double> l(a.size());
  const auto at = [n](std::vector<double>& m, int64_t i, int64_t j) -> double& {
    return m[static_cast<size_t>(i * n + j)];
  };
  for (int64_t i = 0; i < n; ++i) at(l, i, i) = 1;
  for (int64_t p = 0; p < n; p += kTile) {
    for (int64_t r = p + kTile; r < n; ++r) {  // x A_pp = A_rp by elimination
      double m[kTile][kTile + 1];
      for (int i = 0; i < kTile; ++i) {
        for (int j = 0; j < kTile; ++j) m[i][j] = at(a, p + j, p + i);
        m[i][kTile] = at(a, r, p + i);
      }
      for (int i = 0; i < kTile; ++i) {
        for (int q = i + 1; q < kTile; ++q) {
          const double f = m[q][i] / m[i][i];
          for (int j = i; j <= kTile; ++j) m[q][j] -= f * m[i][j];
        }
      }
      for (int i = kTile - 1; i >= 0; --i) {
        double v = m[i][kTile];
        for (int j = i + 1; j < kTile; ++j) v -= m[i][j] * at(l, r, p + j);
        at(l, r, p + i) = v / m[i][i];
      }
    }
    const std::vector<double> before = a;
    for (int64_t r = p + kTile; r < n; ++r) {
      for (int64_t c = p + kTile; c < n; ++c) {
        for (int64_t i = 0; i < kTile; ++i)
          at(a, r, c) -= at(l, r, p + i) * before[static_cast<size_t>((p + i) * n + c)];
      }
    }
  }
  return l;
}

// What LDLQ promises: with F = L^T E M every tile was the search's answer to the target (content + F).
TEST(ColumnEncoder, every_tile_is_the_best_answer_to_its_own_corrected_target) {
  ThreadPool pool(2);
  Case c(pool);
  for (bool two_sided : {true, false}) {
    c.problem.output = two_sided ? &c.output : nullptr;
    const Exl3Tensor tensor = encode(c.problem, pool);
    const std::vector<double> error = error_of(c, tensor);
    const std::vector<double> l = block_triangular(c.input.metric, kK);
    const std::vector<double> m = block_triangular(c.output.metric, kN);
    std::vector<double> le(error.size()), f(error.size());
    for (int64_t i = 0; i < kK; ++i) {
      for (int64_t j = 0; j < kN; ++j) {
        for (int64_t r = 0; r < kK; ++r)
          le[static_cast<size_t>(i * kN + j)] +=
              l[static_cast<size_t>(r * kK + i)] * error[static_cast<size_t>(r * kN + j)];
      }
    }
    for (int64_t i = 0; i < kK; ++i) {
      for (int64_t j = 0; j < kN; ++j) {
        for (int64_t s = 0; s < kN; ++s)
          f[static_cast<size_t>(i * kN + j)] += le[static_cast<size_t>(i * kN + s)] *
                                                (two_sided ? m[static_cast<size_t>(s * kN + j)] : (s == j ? 1.0 : 0.0));
      }
    }
    int n_different = 0;
    for (int64_t b = 0; b < kK / kTile; ++b) {
      for (int64_t s = 0; s < kN / kTile; ++s) {
        float target[kTileSize];
        uint16_t found[kTileSize], stored[kTileSize];
        for (int p = 0; p < kTileSize; ++p) {
          const int e = ring_to_row_major()[p];
          const auto at = static_cast<size_t>((b * kTile + e / kTile) * kN + s * kTile + e % kTile);
          target[p] = static_cast<float>(c.weight[at] - error[at] + f[at]);
        }
        search_tile(target, c.problem.search, found);
        unpack_tile(tensor.trellis.data() + (b * (kN / kTile) + s) * tile_words(6), 6, stored);
        n_different += std::memcmp(found, stored, sizeof found) != 0 ? 1 : 0;
      }
    }
    EXPECT_LE(n_different, 1) << "of 12 tiles; a last-bit difference of a target may change one path; two-sided "
                              << two_sided;
  }
}

TEST(ColumnEncoder, feedback_on_both_sides_beats_one_side_beats_none) {
  ThreadPool pool(1);
  Case c(pool);
  const std::vector<double>* g = &c.output.metric;
  const double both = objective(error_of(c, encode(c.problem, pool)), c.input.metric, g);
  c.problem.output = nullptr;
  const double one = objective(error_of(c, encode(c.problem, pool)), c.input.metric, g);
  std::fill(c.input.feedback.begin(), c.input.feedback.end(), 0.0);
  const double none = objective(error_of(c, encode(c.problem, pool)), c.input.metric, g);
  EXPECT_LT(both, 0.95 * one);
  EXPECT_LT(one, 0.95 * none);
}

TEST(ColumnEncoder, descent_never_raises_the_objective_and_lowers_it_here) {
  ThreadPool pool(1);
  Case c(pool);
  for (bool two_sided : {true, false}) {
    c.problem.output = two_sided ? &c.output : nullptr;
    double before = 0;
    for (int sweeps : {0, 1, 2, 3}) {
      c.problem.descent_sweeps = sweeps;
      const double now =
          objective(error_of(c, encode(c.problem, pool)), c.input.metric, two_sided ? &c.output.metric : nullptr);
      if (sweeps == 1) {
        EXPECT_LT(now, 0.998 * before);
      }
      if (sweeps > 0) {
        EXPECT_LE(now, before * (1 + 1e-12)) << sweeps;
      }
      before = now;
    }
  }
}

TEST(ColumnEncoder, inverse_and_largest_eigenvalue_of_blocks) {
  ThreadPool pool(1);
  const SideMetric side = random_side(kK, "in", pool);
  for (int64_t b = 0; b < kK / kTile; ++b) {
    std::vector<double> v(kTile, 1.0);
    double eigenvalue = 0;
    for (int round = 0; round < 500; ++round) {  // power iteration
      std::vector<double> next(kTile);
      double norm = 0;
      for (int64_t i = 0; i < kTile; ++i) {
        for (int64_t j = 0; j < kTile; ++j)
          next[static_cast<size_t>(i)] +=
              side.metric[static_cast<size_t>((b * kTile + i) * kK + b * kTile + j)] * v[static_cast<size_t>(j)];
        norm += next[static_cast<size_t>(i)] * next[static_cast<size_t>(i)];
      }
      eigenvalue = std::sqrt(norm);
      for (double& x : next) x /= eigenvalue;
      v = next;
    }
    EXPECT_GE(side.largest[static_cast<size_t>(b)], eigenvalue * (1 - 1e-9));
    EXPECT_LE(side.largest[static_cast<size_t>(b)], eigenvalue * 1.0443);  // 16^(1/64)
    for (int64_t i = 0; i < kTile; ++i) {
      for (int64_t j = 0; j < kTile; ++j) {
        double sum = 0;
        for (int64_t m = 0; m < kTile; ++m)
          sum += side.metric[static_cast<size_t>((b * kTile + i) * kK + b * kTile + m)] *
                 side.inverse[static_cast<size_t>((b * kTile + m) * kTile + j)];
        EXPECT_NEAR(sum, i == j ? 1.0 : 0.0, 1e-10);
      }
    }
  }
}

TEST(ColumnEncoder, threads_do_not_change_bytes) {
  ThreadPool one(1), three(3);
  Case c(one);
  c.problem.descent_sweeps = 1;
  EXPECT_EQ(encode(c.problem, one).trellis, encode(c.problem, three).trellis);
}

}  // namespace
}  // namespace espalier::codec
