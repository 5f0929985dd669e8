// The bytes of an encoded matrix depend on the matrix and its options only: not on threads, and not on what else is
// encoded at the same time.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "base/rng.h"
#include "bench/peer/golden_cases.h"
#include "codec/quantizer.h"

namespace espalier::codec {
namespace {

double gaussian(const CounterRng& rng, uint64_t i) {
  return std::sqrt(-2 * std::log(1 - rng.uniform(2 * i))) * std::cos(6.283185307179586 * rng.uniform(2 * i + 1));
}

struct Matrix {
  std::string name;
  int64_t k = 0;
  int64_t n = 0;
  QuantizeOptions options;
  std::vector<float> weight;
  std::vector<double> hessian;
};

Matrix make_matrix(int64_t k, int64_t n, Preset preset, int k2) {
  Matrix m;
  m.name = std::string(preset_name(preset)) + " K=" + width_text(k2);
  m.k = k;
  m.n = n;
  m.options = quantize_preset(preset);
  m.options.k2 = k2;
  m.options.name = m.name;
  const CounterRng rng(17, m.name);
  for (int64_t i = 0; i < k * n; ++i) {
    m.weight.push_back(static_cast<float>(0.02 * gaussian(rng, static_cast<uint64_t>(i)) * (1 + (i % n) % 3)));
  }
  std::vector<float> x;
  for (int64_t i = 0; i < 2 * k * k; ++i) {
    x.push_back(static_cast<float>(gaussian(rng, static_cast<uint64_t>(1000000 + i)) * (1 + i % k % 5)));
  }
  m.hessian = golden::hessian_of(x, k);
  return m;
}

QuantizedMatrix encode(const Matrix& m, ThreadPool& pool) {
  return quantize_matrix(m.weight.data(), m.k, m.n, m.hessian.data(), m.options, pool).value();
}

void expect_same(const QuantizedMatrix& a, const QuantizedMatrix& b, const std::string& what) {
  EXPECT_EQ(a.tensor.trellis, b.tensor.trellis) << what;
  EXPECT_EQ(a.tensor.suh, b.tensor.suh) << what;
  EXPECT_EQ(a.tensor.svh, b.tensor.svh) << what;
  EXPECT_EQ(a.true_error, b.true_error) << what;
}

// One group of columns, whose antidiagonals are spread over the threads, and two, which threads take whole.
std::vector<Matrix> matrices() {
  std::vector<Matrix> list;
  for (int k2 : {3, 5, 6, 7}) list.push_back(make_matrix(128, 128, Preset::kFast, k2));
  list.push_back(make_matrix(128, 256, Preset::kFast, 5));
  for (int k2 : {6, 7}) list.push_back(make_matrix(128, 128, Preset::kBest, k2));
  return list;
}

TEST(QuantizerBytes, both_presets_give_the_same_for_any_threads_and_alone_or_in_a_batch) {
  const std::vector<Matrix> list = matrices();
  ThreadPool one(1), two(2), three(3);
  std::vector<QuantizedMatrix> together(list.size());
  three.parallel_for(static_cast<int64_t>(list.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      together[static_cast<size_t>(i)] = encode(list[static_cast<size_t>(i)], three);
  });
  for (size_t i = 0; i < list.size(); ++i) {
    const QuantizedMatrix expected = encode(list[i], one);
    expect_same(together[i], expected, list[i].name + " in a batch");
    expect_same(encode(list[i], two), expected, list[i].name + " with two threads");
    expect_same(encode(list[i], three), expected, list[i].name + " with three threads");
  }
}

TEST(QuantizerBytes, matrices_that_share_their_inputs_give_the_same_for_any_threads) {
  const Matrix a = make_matrix(128, 128, Preset::kFast, 5);
  const Matrix b = make_matrix(128, 128, Preset::kFast, 7);
  const auto run = [&](int n_threads) {
    ThreadPool pool(n_threads);
    return quantize_with_shared_inputs({{a.weight.data(), a.n, "a"}, {b.weight.data(), b.n, "b"}}, 128,
                                       a.hessian.data(), a.options, pool)
        .value();
  };
  const std::vector<QuantizedMatrix> expected = run(1);
  EXPECT_EQ(expected[0].tensor.suh, expected[1].tensor.suh);
  for (int n_threads : {2, 3}) {
    const std::vector<QuantizedMatrix> got = run(n_threads);
    for (size_t i = 0; i < 2; ++i) expect_same(got[i], expected[i], std::to_string(n_threads) + " threads");
  }
}

}  // namespace
}  // namespace espalier::codec
