#include "codec/cuda/experts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/gpu/exl3_data.h"

namespace espalier::codec::cuda {
namespace {

constexpr double kPromised = 1e-3;  // relative error of a token's output
constexpr float kLimit = 7.0f;

struct Routing {
  int64_t n_tokens, n_active;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

// n_experts random experts with widths of their own, on both sides.
class Experts {
 public:
  Experts(device::Stream& stream, int64_t d_model, int64_t d_ff, int n_experts, const std::vector<int>& widths)
      : stream_(stream), d_model_(d_model), d_ff_(d_ff), scratch_(taken(ExpertsScratch::create(stream, d_model, d_ff))) {
    const CounterRng rng(21, "widths");
    std::vector<ExpertMatrices> experts;
    for (int e = 0; e < n_experts; ++e) {
      Matrix* made[3];
      for (int i = 0; i < 3; ++i) {
        const int k2 = widths[rng.bits(static_cast<uint64_t>(3 * e + i)) % widths.size()];
        const std::string name = "expert " + std::to_string(e) + "." + std::to_string(i);
        tensors_.push_back(random_tensor(i == 2 ? d_ff : d_model, i == 2 ? d_model : d_ff, k2, Codebook::kMul1, name));
        matrices_.push_back(std::make_unique<Matrix>(taken(Matrix::upload(stream, tensors_.back().view()))));
        made[i] = matrices_.back().get();
      }
      experts.push_back({made[0]->view(), made[1]->view(), made[2]->view()});
    }
    table_ = std::make_unique<ExpertTable>(taken(ExpertTable::create(stream, experts)));
  }

  std::vector<float> run(const std::vector<float>& x, const Routing& routing, int n_blocks = 0) {
    const int usual = scratch_.n_blocks;
    if (n_blocks > 0) scratch_.n_blocks = n_blocks;
    const auto in = taken(device::DeviceArray<float>::upload(stream_, x, "x"));
    const auto ids = taken(device::DeviceArray<int32_t>::upload(stream_, routing.ids, "ids"));
    const auto weights = taken(device::DeviceArray<float>::upload(stream_, routing.weights, "weights"));
    const auto out = taken(device::DeviceArray<float>::allocate(0, x.size(), "y"));
    must(stream_.fill_bytes(out.data(), 0xFF, x.size() * sizeof(float)));
    ExpertsParams p;
    p.x = in.data(), p.ids = ids.data(), p.weights = weights.data(), p.y = out.data();
    p.n_tokens = routing.n_tokens, p.n_active = routing.n_active, p.limit = kLimit;
    must(plan_experts(stream_, *table_, p, scratch_));
    must(run_experts(stream_, *table_, p, scratch_));
    scratch_.n_blocks = usual;
    return taken(out.download(stream_));
  }

  // Three calls in a row, each with the output of the one before; waits between them or not.
  std::vector<float> chain(const std::vector<float>& x, const Routing& routing, bool waits) {
    const auto ids = taken(device::DeviceArray<int32_t>::upload(stream_, routing.ids, "ids"));
    const auto weights = taken(device::DeviceArray<float>::upload(stream_, routing.weights, "weights"));
    std::vector<device::DeviceArray<float>> rows;
    rows.push_back(taken(device::DeviceArray<float>::upload(stream_, x, "x")));
    for (int i = 0; i < 3; ++i) {
      rows.push_back(taken(device::DeviceArray<float>::allocate(0, x.size(), "y")));
      must(stream_.fill_bytes(rows.back().data(), 0xFF, x.size() * sizeof(float)));
    }
    ExpertsParams p;
    p.ids = ids.data(), p.weights = weights.data();
    p.n_tokens = routing.n_tokens, p.n_active = routing.n_active, p.limit = kLimit;
    must(plan_experts(stream_, *table_, p, scratch_));
    for (size_t i = 0; i < 3; ++i) {
      p.x = rows[i].data(), p.y = rows[i + 1].data();
      must(run_experts(stream_, *table_, p, scratch_));
      if (waits) must(stream_.synchronize());
    }
    return taken(rows.back().download(stream_));
  }

  // The same in float64 with the weights that the CPU decodes.
  std::vector<double> reference(const std::vector<float>& x, const Routing& routing, ThreadPool& pool) {
    std::vector<double> y(x.size());
    for (int64_t t = 0; t < routing.n_tokens; ++t) {
      const std::vector<float> row(x.begin() + t * d_model_, x.begin() + (t + 1) * d_model_);
      for (int64_t a = 0; a < routing.n_active; ++a) {
        const size_t slot = static_cast<size_t>(t * routing.n_active + a), e = static_cast<size_t>(routing.ids[slot]);
        const std::vector<double> g = product_f64(row, weight(3 * e, pool), d_model_, d_ff_, pool);
        const std::vector<double> u = product_f64(row, weight(3 * e + 1, pool), d_model_, d_ff_, pool);
        std::vector<double> h(g.size());
        for (size_t i = 0; i < h.size(); ++i) {
          const double gate = std::min(g[i], double{kLimit}), up = std::clamp(u[i], -double{kLimit}, double{kLimit});
          h[i] = gate / (1 + std::exp(-gate)) * up;
        }
        const std::vector<double> out = product_f64(h, weight(3 * e + 2, pool), d_ff_, d_model_, pool);
        for (int64_t i = 0; i < d_model_; ++i) y[static_cast<size_t>(t * d_model_ + i)] += routing.weights[slot] * out[static_cast<size_t>(i)];
      }
    }
    return y;
  }

 private:
  const std::vector<float>& weight(size_t index, ThreadPool& pool) {
    if (decoded_.size() < tensors_.size()) decoded_.resize(tensors_.size());
    if (decoded_[index].empty()) decoded_[index] = cpu_weight(tensors_[index], pool);
    return decoded_[index];
  }

  device::Stream& stream_;
  int64_t d_model_, d_ff_;
  ExpertsScratch scratch_;
  std::vector<Exl3Tensor> tensors_;
  std::vector<std::vector<float>> decoded_;
  std::vector<std::unique_ptr<Matrix>> matrices_;
  std::unique_ptr<ExpertTable> table_;
};

Routing random_routing(int64_t n_tokens, int64_t n_active, int n_experts, const std::string& name) {
  const CounterRng rng(22, name);
  Routing r{n_tokens, n_active, {}, {}};
  for (int64_t t = 0; t < n_tokens; ++t) {
    std::vector<int32_t> ids;
    for (uint64_t i = 0; static_cast<int64_t>(ids.size()) < n_active; ++i) {
      const int32_t id = static_cast<int32_t>(rng.bits(static_cast<uint64_t>(t) * 1000 + i) % static_cast<uint64_t>(n_experts));
      if (std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
    }
    for (int32_t id : ids) {
      r.ids.push_back(id);
      r.weights.push_back(static_cast<float>(0.1 + rng.uniform(r.ids.size() + 77777)));
    }
  }
  return r;
}

Routing one_token(const Routing& all, int64_t t) {
  Routing r{1, all.n_active, {}, {}};
  for (int64_t a = 0; a < all.n_active; ++a) {
    r.ids.push_back(all.ids[static_cast<size_t>(t * all.n_active + a)]);
    r.weights.push_back(all.weights[static_cast<size_t>(t * all.n_active + a)]);
  }
  return r;
}

class Exl3Experts : public ::testing::Test {
 protected:
  void expect_close(Experts& experts, int64_t d_model, const Routing& routing, const std::string& name) {
    const std::vector<float> x = random_rows(routing.n_tokens, d_model, name);
    const std::vector<double> expected = experts.reference(x, routing, pool_);
    const std::vector<float> got = experts.run(x, routing);
    for (int64_t t = 0; t < routing.n_tokens; ++t) {
      EXPECT_LE(relative_error(&got[static_cast<size_t>(t * d_model)], &expected[static_cast<size_t>(t * d_model)], d_model), kPromised)
          << name << " token " << t;
    }
  }

  device::Stream stream_ = taken(device::Stream::create(0));
  ThreadPool pool_;
};

TEST_F(Exl3Experts, ragged_widths_and_shared_experts_are_close_to_float64) {
  Experts experts(stream_, 384, 256, 9, {kAllWidths, kAllWidths + 11});
  for (int64_t tokens = 1; tokens <= 8; ++tokens) {
    expect_close(experts, 384, random_routing(tokens, 5, 9, "r" + std::to_string(tokens)), std::to_string(tokens) + " tokens");
  }
}

TEST_F(Exl3Experts, more_than_four_rows_of_one_expert_are_close_to_float64) {
  Experts experts(stream_, 256, 128, 2, {6});
  Routing all{8, 1, std::vector<int32_t>(8, 1), std::vector<float>(8, 0.5f)};
  expect_close(experts, 256, all, "eight rows of one expert");
}

TEST_F(Exl3Experts, real_shapes_are_close_to_float64) {
  for (const std::vector<int>& widths : {std::vector<int>{6}, {4, 6, 8, 10}}) {
    Experts experts(stream_, 5120, 2304, 4, widths);
    expect_close(experts, 5120, random_routing(2, 3, 4, "real"), "real shape");
  }
}

TEST_F(Exl3Experts, a_token_has_the_same_bits_alone_and_in_any_batch) {
  Experts experts(stream_, 640, 384, 12, {4, 5, 6, 8, 10});
  const Routing routing = random_routing(8, 6, 12, "exact");
  const std::vector<float> x = random_rows(8, 640, "exact");
  const std::vector<float> all = experts.run(x, routing);
  for (int64_t t = 0; t < 8; ++t) {
    const std::vector<float> row(x.begin() + t * 640, x.begin() + (t + 1) * 640), expected(all.begin() + t * 640, all.begin() + (t + 1) * 640);
    EXPECT_EQ(experts.run(row, one_token(routing, t)), expected) << "token " << t;
  }
}

TEST_F(Exl3Experts, neither_repetition_nor_the_number_of_blocks_changes_a_bit) {
  Experts experts(stream_, 640, 384, 12, {4, 6, 10});
  const Routing routing = random_routing(3, 6, 12, "cuts");
  const std::vector<float> x = random_rows(3, 640, "cuts");
  const std::vector<float> first = experts.run(x, routing);
  for (int i = 0; i < 20; ++i) ASSERT_EQ(experts.run(x, routing), first) << "call " << i;
  for (int n_blocks : {1, 2, 3, 7, 50, 131}) EXPECT_EQ(experts.run(x, routing, n_blocks), first) << n_blocks << " blocks";
}

TEST_F(Exl3Experts, calls_in_a_row_need_no_wait_between_them) {
  for (const std::vector<int>& widths : {std::vector<int>{6}, {4}, {8}, {4, 6, 8, 10}, {3, 16}}) {
    Experts experts(stream_, 640, 384, 12, widths);
    for (int64_t tokens : {1, 3, 8}) {
      const Routing routing = random_routing(tokens, 6, 12, "chain");
      const std::vector<float> x = random_rows(tokens, 640, "chain");
      const std::vector<float> expected = experts.chain(x, routing, true);
      ASSERT_TRUE(std::all_of(expected.begin(), expected.end(), [](float v) { return std::isfinite(v); }));
      for (int i = 0; i < 10; ++i) ASSERT_EQ(experts.chain(x, routing, false), expected) << tokens << " tokens, chain " << i;
    }
  }
}

// Widths decide which kernels run (one width, the common ones, all); the results are those of float64 in each.
TEST_F(Exl3Experts, every_set_of_widths_is_close_to_float64) {
  for (const std::vector<int>& widths : {std::vector<int>{2}, {3}, {4}, {5}, {6}, {7}, {8}, {10}, {12}, {14}, {16}, {4, 10}, {2, 16}}) {
    Experts experts(stream_, 384, 256, 6, widths);
    expect_close(experts, 384, random_routing(3, 4, 6, "widths"), "k2 " + std::to_string(widths[0]));
  }
}

TEST_F(Exl3Experts, a_nan_stays_with_its_token) {
  Experts experts(stream_, 256, 256, 6, {6});
  const Routing routing = random_routing(4, 3, 6, "nan");
  std::vector<float> x = random_rows(4, 256, "nan");
  const std::vector<float> before = experts.run(x, routing);
  x[2 * 256 + 9] = NAN;
  const std::vector<float> after = experts.run(x, routing);
  for (size_t i = 0; i < after.size(); ++i) {
    if (i / 256 == 2) {
      EXPECT_TRUE(std::isnan(after[i])) << i;
    } else {
      EXPECT_EQ(after[i], before[i]) << i;
    }
  }
}

TEST_F(Exl3Experts, shapes_that_do_not_fit_are_named) {
  const Exl3Tensor t = random_tensor(256, 128, 6, Codebook::kMul1, "shape");
  const Matrix m = taken(Matrix::upload(stream_, t.view()));
  const ExpertMatrices wrong[] = {{m.view(), m.view(), m.view()}};
  const auto table = ExpertTable::create(stream_, wrong);
  ASSERT_FALSE(table.ok());
  EXPECT_THAT(table.error().message(), ::testing::HasSubstr("expert 0 projection 2"));
}

}  // namespace
}  // namespace espalier::codec::cuda
