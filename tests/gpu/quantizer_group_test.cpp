// Quantizing on a GPU against the CPU: factors bit for bit, whole matrices byte for byte. The CPU's quantizer has
// oracles of its own.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "base/rng.h"
#include "codec/block_ldl.h"
#include "codec/cuda/factor.h"
#include "codec/cuda/hessian.h"
#include "codec/cuda/quantizer.h"
#include "device/buffer.h"

namespace espalier::codec {
namespace {

double gaussian(const CounterRng& rng, uint64_t i) {
  return std::sqrt(-2 * std::log(1 - rng.uniform(2 * i))) * std::cos(6.283185307179586 * rng.uniform(2 * i + 1));
}

// X^T X of `rows` rows whose channels differ in size by up to a factor of 30.
std::vector<double> test_hessian(int64_t k, int64_t rows, uint64_t seed) {
  const CounterRng rng(seed, "activations");
  std::vector<double> x(static_cast<size_t>(rows * k)), h(static_cast<size_t>(k * k));
  for (size_t i = 0; i < x.size(); ++i)
    x[i] = gaussian(rng, i) * std::exp(0.8 * gaussian(CounterRng(seed, "channels"), i % static_cast<size_t>(k)));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < k; ++i) {
      for (int64_t j = 0; j < k; ++j)
        h[static_cast<size_t>(i * k + j)] += x[static_cast<size_t>(r * k + i)] * x[static_cast<size_t>(r * k + j)];
    }
  }
  return h;
}

std::vector<float> test_weight(int64_t k, int64_t n, uint64_t seed) {
  const CounterRng rng(seed, "weight");
  std::vector<float> w(static_cast<size_t>(k * n));
  for (size_t i = 0; i < w.size(); ++i) w[i] = static_cast<float>(0.02 * gaussian(rng, i));
  return w;
}

class GpuQuantizer : public ::testing::Test {
 protected:
  void SetUp() override {
    Result<device::Stream> created = device::Stream::create(0);
    ASSERT_TRUE(created.ok()) << created.error().message();
    stream_.emplace(std::move(created).value());
  }
  std::optional<device::Stream> stream_;
  ThreadPool pool_;
};

TEST_F(GpuQuantizer, factor_and_feedback_equal_the_cpu_bit_for_bit) {
  constexpr int64_t k = 384;
  std::vector<double> h = test_hessian(k, 600, 3);
  auto matrix = device::DeviceArray<double>::upload(*stream_, h, "matrix");
  auto feedback = device::DeviceArray<double>::allocate(0, h.size(), "feedback");
  auto failed = device::DeviceArray<int>::allocate(0, 1, "flag");
  ASSERT_TRUE(matrix.ok() && feedback.ok() && failed.ok());
  ASSERT_TRUE(cholesky_on_device(*stream_, matrix->data(), k, failed->data()).ok());
  ASSERT_TRUE(block_ldl_feedback_on_device(*stream_, matrix->data(), k, feedback->data()).ok());
  const auto found = matrix->download(*stream_);
  const auto found_feedback = feedback->download(*stream_);
  const auto flag = failed->download(*stream_);
  ASSERT_TRUE(found.ok() && found_feedback.ok() && flag.ok());
  EXPECT_EQ((*flag)[0], 0);
  ASSERT_TRUE(cholesky_upper(h.data(), k, pool_));
  for (int64_t i = 0; i < k; ++i) {
    ASSERT_EQ(std::memcmp(h.data() + i * k + i, found->data() + i * k + i, static_cast<size_t>(k - i) * sizeof(double)),
              0)
        << "row " << i;
  }
  // The defining identity, element by element: rows below a block of L are those of U^T times the inverse of the
  // block's own corner.
  for (int64_t b = 0; b < k / kTile; ++b) {
    for (int64_t s = (b + 1) * kTile; s < k; s += 37) {
      for (int64_t j = 0; j < kTile; ++j) {
        double sum = 0, size = 0;
        for (int64_t m = j; m < kTile; ++m) {
          const double term = (*found_feedback)[static_cast<size_t>((b * kTile + m) * k + s)] *
                              h[static_cast<size_t>((b * kTile + j) * k + b * kTile + m)];
          sum += term;
          size += std::fabs(term);
        }
        const double wanted = h[static_cast<size_t>((b * kTile + j) * k + s)];
        ASSERT_NEAR(sum, wanted, 64 * 2.3e-16 * (size + std::fabs(wanted)));
      }
    }
  }
}

TEST_F(GpuQuantizer, a_matrix_without_cholesky_factor_is_noticed) {
  constexpr int64_t k = 128;
  std::vector<double> h(static_cast<size_t>(k * k));
  for (int64_t i = 0; i < k; ++i) h[static_cast<size_t>(i * k + i)] = i == 100 ? -1.0 : 1.0;
  auto matrix = device::DeviceArray<double>::upload(*stream_, h, "matrix");
  auto failed = device::DeviceArray<int>::allocate(0, 1, "flag");
  ASSERT_TRUE(matrix.ok() && failed.ok());
  ASSERT_TRUE(cholesky_on_device(*stream_, matrix->data(), k, failed->data()).ok());
  const auto flag = failed->download(*stream_);
  ASSERT_TRUE(flag.ok());
  EXPECT_EQ((*flag)[0], 1);
}

// Members with a shared Hessian, an own one, none, and an empty one; columns and rows without weights.
TEST_F(GpuQuantizer, a_group_gives_the_bytes_of_the_cpu_whatever_its_composition) {
  constexpr int64_t k = 256, n = 512;
  const std::vector<double> shared = test_hessian(k, 400, 5), own = test_hessian(k, 300, 6),
                            empty(static_cast<size_t>(k * k));
  std::vector<std::vector<float>> weights;
  for (uint64_t m = 0; m < 5; ++m) weights.push_back(test_weight(k, n, 10 + m));
  for (int64_t i = 0; i < k; ++i) weights[1][static_cast<size_t>(i * n + 17)] = 0;
  for (int64_t j = 0; j < n; ++j) weights[1][static_cast<size_t>(33 * n + j)] = 0;
  const std::vector<GroupMember> members = {{weights[0].data(), shared.data(), "a"},
                                            {weights[1].data(), shared.data(), "b"},
                                            {weights[2].data(), own.data(), "c"},
                                            {weights[3].data(), nullptr, "d"},
                                            {weights[4].data(), empty.data(), "e"}};
  for (int k2 : {4, 6, 7, -6}) {  // negative: without feedback along the outputs
    QuantizeOptions options;
    options.k2 = std::abs(k2);
    options.two_sided = k2 > 0;
    options.refit_rounds = 0;
    options.seed = 9;
    const auto group = quantize_group_on_device(*stream_, members, k, n, options, pool_);
    ASSERT_TRUE(group.ok()) << group.error().message();
    for (size_t m = 0; m < members.size(); ++m) {
      SCOPED_TRACE(members[m].name + ", " + std::to_string(k2) + " half bits");
      options.name = members[m].name;
      const auto wanted = quantize_matrix(members[m].weight, k, n, members[m].hessian, options, pool_);
      ASSERT_TRUE(wanted.ok()) << wanted.error().message();
      const QuantizedMatrix& found = (*group)[m];
      EXPECT_TRUE(found.tensor.trellis == wanted->tensor.trellis);
      EXPECT_TRUE(found.tensor.suh == wanted->tensor.suh && found.tensor.svh == wanted->tensor.svh);
      EXPECT_EQ(found.true_error, wanted->true_error);
      EXPECT_EQ(found.relative_mse, wanted->relative_mse);
      EXPECT_EQ(found.damping, wanted->damping);
    }
    const auto alone = quantize_group_on_device(*stream_, std::span(members).subspan(2, 1), k, n, options, pool_);
    ASSERT_TRUE(alone.ok()) << alone.error().message();
    EXPECT_TRUE((*alone)[0].tensor.trellis == (*group)[2].tensor.trellis);
  }
}

// Against plain loops: chunks of 1,024 kept rows, fp32 FMA chains inside, fp64 sums between.
TEST_F(GpuQuantizer, hessian_rows_are_summed_in_the_defined_order) {
  constexpr int64_t k = 200, n_rows = 2300;
  const CounterRng rng(4, "rows");
  std::vector<float> x(static_cast<size_t>(k * n_rows)), scale(static_cast<size_t>(n_rows));
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(gaussian(rng, i));
  for (size_t i = 0; i < scale.size(); ++i) scale[i] = 0.25f + 0.001f * static_cast<float>(i % 700);
  x[static_cast<size_t>(5 * k + 7)] = INFINITY;
  x[static_cast<size_t>(1500 * k)] = NAN;
  std::vector<double> wanted(static_cast<size_t>(k * k));
  std::vector<float> chain(wanted.size());
  int64_t kept = 0;
  for (int64_t r = 0; r < n_rows; ++r) {
    if (r != 5 && r != 1500) {
      for (int64_t i = 0; i < k; ++i) {
        const float a = scale[static_cast<size_t>(r)] * x[static_cast<size_t>(r * k + i)];
        for (int64_t j = 0; j < k; ++j) {
          float& sum = chain[static_cast<size_t>(i * k + j)];
          sum = std::fma(a, scale[static_cast<size_t>(r)] * x[static_cast<size_t>(r * k + j)], sum);
        }
      }
      ++kept;
    }
    if (kept == 1024 || r + 1 == n_rows) {
      for (size_t e = 0; e < wanted.size(); ++e) wanted[e] += double{chain[e]};
      std::fill(chain.begin(), chain.end(), 0.0f);
      kept = 0;
    }
  }
  auto rows = device::DeviceArray<float>::upload(*stream_, x, "rows");
  auto hessian = DeviceHessian::create(*stream_, k);
  ASSERT_TRUE(rows.ok() && hessian.ok());
  for (int64_t begin = 0; begin < n_rows; begin += 900) {
    const int64_t n = std::min<int64_t>(900, n_rows - begin);
    ASSERT_TRUE(hessian->add(*stream_, rows->data() + begin * k, n, scale.data() + begin).ok());
  }
  const auto sum = hessian->finish(*stream_);
  ASSERT_TRUE(sum.ok());
  std::vector<double> found(wanted.size());
  ASSERT_TRUE(stream_->copy_to_host(found.data(), *sum, found.size() * sizeof(double)).ok());
  ASSERT_TRUE(stream_->synchronize().ok());
  EXPECT_EQ(hessian->rows(), n_rows - 2);
  EXPECT_EQ(hessian->dropped(), 2);
  EXPECT_TRUE(found == wanted);
}

TEST_F(GpuQuantizer, options_of_the_cpu_alone_are_refused_by_name) {
  const std::vector<float> weight = test_weight(128, 128, 1);
  const std::vector<GroupMember> members = {{weight.data(), nullptr, "a"}};
  QuantizeOptions options;
  options.refit_rounds = 1;
  const auto result = quantize_group_on_device(*stream_, members, 128, 128, options, pool_);
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.error().code(), StatusCode::kUnimplemented);
  EXPECT_NE(result.error().message().find("refit_rounds"), std::string::npos) << result.error().message();
}

}  // namespace
}  // namespace espalier::codec
