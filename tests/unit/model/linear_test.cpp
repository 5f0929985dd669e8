#include "model/linear.h"

#include <gtest/gtest.h>

#include "base/rng.h"
#include "codec/exl3_tensor.h"
#include "codec/int8_matmul.h"
#include "tensor/float_formats.h"

namespace espalier {
namespace {

codec::Exl3Tensor random_tensor(int64_t k, int64_t n, int k2, codec::Codebook codebook) {
  const CounterRng rng(9, "tensor");
  codec::Exl3Tensor t;
  t.k = k;
  t.n = n;
  t.k2 = k2;
  t.codebook = codebook;
  t.trellis.resize(static_cast<size_t>(codec::trellis_words(k, n, k2)));
  for (size_t i = 0; i < t.trellis.size(); ++i) t.trellis[i] = static_cast<uint16_t>(rng.bits(i));
  t.suh.assign(static_cast<size_t>(k), encode_f16(0.05f));
  t.svh.assign(static_cast<size_t>(n), encode_f16(1));
  return t;
}

std::vector<float> random_rows(int64_t size) {
  const CounterRng rng(10, "rows");
  std::vector<float> x(static_cast<size_t>(size));
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(rng.uniform(i) * 2 - 1);
  return x;
}

std::vector<float> applied(ThreadPool& pool, const Linear& linear, const std::vector<float>& x) {
  const int64_t rows = static_cast<int64_t>(x.size()) / linear.in();
  std::vector<float> y(static_cast<size_t>(rows * linear.out()));
  linear.apply(pool, x.data(), rows, y.data());
  return y;
}

TEST(Linear, integer_products_are_the_codecs_in_both_residencies) {
  ThreadPool pool(2);
  const codec::Exl3Tensor tensor = random_tensor(256, 384, 5, codec::Codebook::kMul1);
  const std::vector<float> x = random_rows(3 * 256);
  for (const Products products : {Products::kInt8, Products::kInt8Residual}) {
    std::vector<float> expected(3 * 384);
    codec::int8_matmul(pool, tensor.view(), x.data(), 3, expected.data(),
                       products == Products::kInt8 ? codec::Int8Mode::kPlain : codec::Int8Mode::kResidual);
    for (const WeightResidency residency : {WeightResidency::kUnpacked, WeightResidency::kStored}) {
      const Linear linear = Linear::from_exl3(tensor, residency, products);
      EXPECT_EQ(linear.products(), products);
      EXPECT_EQ(applied(pool, linear, x), expected) << products_name(products);
    }
  }
}

TEST(Linear, other_codebooks_and_forms_stay_exact) {
  ThreadPool pool(1);
  const codec::Exl3Tensor tensor = random_tensor(128, 128, 6, codec::Codebook::kMcg);
  const std::vector<float> x = random_rows(2 * 128);
  const Linear exact = Linear::from_exl3(tensor, WeightResidency::kUnpacked);
  const Linear asked = Linear::from_exl3(tensor, WeightResidency::kUnpacked, Products::kInt8);
  EXPECT_EQ(asked.products(), Products::kExact);
  EXPECT_EQ(applied(pool, asked, x), applied(pool, exact, x));
  EXPECT_EQ(Linear::from_kn(x.data(), 2, 128).products(), Products::kExact);
}

TEST(Linear, a_mixed_list_equals_single_products) {
  ThreadPool pool(2);
  std::vector<Linear> linears;
  linears.push_back(
      Linear::from_exl3(random_tensor(128, 256, 4, codec::Codebook::kMul1), WeightResidency::kStored, Products::kInt8));
  linears.push_back(
      Linear::from_exl3(random_tensor(256, 128, 6, codec::Codebook::kMcg), WeightResidency::kStored, Products::kInt8));
  linears.push_back(Linear::from_exl3(random_tensor(384, 128, 7, codec::Codebook::kMul1), WeightResidency::kUnpacked,
                                      Products::kInt8Residual));
  linears.push_back(Linear::from_kn(random_rows(64 * 32).data(), 64, 32));
  linears.push_back(
      Linear::from_exl3(random_tensor(128, 128, 3, codec::Codebook::kMul1), WeightResidency::kStored, Products::kInt8));
  const int64_t rows[] = {1, 5, 2, 3, 0};
  std::vector<std::vector<float>> x, y;
  std::vector<Linear::Job> jobs;
  for (size_t i = 0; i < linears.size(); ++i) {
    x.push_back(random_rows(rows[i] * linears[i].in()));
    y.emplace_back(static_cast<size_t>(rows[i] * linears[i].out()));
  }
  for (size_t i = 0; i < linears.size(); ++i) jobs.push_back({&linears[i], x[i].data(), rows[i], y[i].data()});
  Linear::apply_all(pool, jobs);
  for (size_t i = 0; i < linears.size(); ++i) EXPECT_EQ(y[i], applied(pool, linears[i], x[i])) << i;
}

}  // namespace
}  // namespace espalier
