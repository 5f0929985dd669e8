// Row-wise operations: norms, rotation, mHC, SwiGLU, router, Engram gate, selection.
#include <algorithm>
#include <cmath>

#include "conformance/ops_cases.h"
#include "ops/engram_gate.h"
#include "ops/fake_quant.h"
#include "ops/mhc.h"
#include "ops/rms_norm.h"
#include "ops/rope.h"
#include "ops/router.h"
#include "ops/select.h"
#include "ops/swiglu.h"

namespace espalier::ops {
namespace {

const std::vector<std::pair<int64_t, int64_t>> kSizes = {{0, 8},  {1, 1},   {2, 15},  {3, 16},
                                                         {5, 17}, {4, 127}, {33, 256}};

TEST(OpsRmsNorm, all_tiers_give_equal_bits_and_agree_with_the_reference) {
  for (const auto& [rows, d] : kSizes) {
    const std::vector<float> x = random_floats("x", rows * d, 1e-8f), w = random_floats("w", d);
    expect_conformance(
        "rms_norm " + std::to_string(d),
        [&](ThreadPool& pool) {
          std::vector<float> y(x.size());
          rms_norm(pool, {x.data(), w.data(), y.data(), rows, d, 1e-20});
          return y;
        },
        [&](size_t) { return 8.0 * std::sqrt(static_cast<double>(d)) * kEps; });
  }
}

TEST(OpsRmsNorm, eps_counts_where_the_values_are_small) {
  ThreadPool pool(1);
  const float x[2] = {1e-10f, 1e-10f}, w[2] = {1, 1};
  float y[2];
  rms_norm(pool, {x, w, y, 1, 2, 1e-20});
  EXPECT_NEAR(y[0], 1.0 / std::sqrt(2.0), 1e-6);
}

TEST(OpsRope, all_tiers_give_equal_bits_and_agree_with_the_reference) {
  for (const auto& [rows, dim] : {std::pair<int64_t, int64_t>{0, 8}, {1, 2}, {3, 10}, {17, 64}}) {
    for (bool is_inverse : {false, true}) {
      const std::vector<float> f = yarn_frequencies(dim / 2 * 2, 160000, {16, 32, 1, 65536});
      const std::vector<float> x = random_floats("x", rows * 3 * (dim + 5));
      std::vector<int64_t> positions;
      for (int64_t t = 0; t < rows; ++t) positions.push_back(t * t * 3571 % 1048576);
      expect_conformance(
          "rope " + std::to_string(dim),
          [&](ThreadPool& pool) {
            std::vector<float> y = x;
            rope(pool, {y.data(), positions.data(), rows, 3, dim + 5, dim, f.data(), is_inverse});
            return y;
          },
          [&](size_t) { return 4.0 * kEps; });
    }
  }
}

TEST(OpsRope, inverse_undoes_the_rotation_and_the_first_channels_stay) {
  ThreadPool pool(1);
  const std::vector<float> f = rope_frequencies(8, 10000);
  const std::vector<float> x = random_floats("x", 20);
  std::vector<float> y = x;
  const int64_t positions[1] = {777};
  rope(pool, {y.data(), positions, 1, 2, 10, 8, f.data(), false});
  EXPECT_EQ(y[0], x[0]);
  EXPECT_EQ(y[1], x[1]);
  EXPECT_NE(y[2], x[2]);
  rope(pool, {y.data(), positions, 1, 2, 10, 8, f.data(), true});
  for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(y[i], x[i], 1e-6);
}

TEST(OpsRope, released_yarn_ramp_runs_from_pair_15_to_25) {
  const std::vector<float> plain = rope_frequencies(64, 160000),
                           yarn = yarn_frequencies(64, 160000, {16, 32, 1, 65536});
  for (size_t i = 0; i < 32; ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - 15.0) / 10.0, 0.0, 1.0);
    EXPECT_NEAR(yarn[i] / plain[i], ramp / 16.0 + 1.0 - ramp, 1e-6) << i;
  }
}

TEST(OpsMhc, coefficients_collapse_and_expand_conform) {
  for (const auto& [rows, d] : kSizes) {
    const int64_t n = 4, width = n * (2 + n);
    const std::vector<float> h = random_floats("h", rows * n * d, 2.0f),
                             dots = random_floats("dots", rows * width, 3.0f);
    const std::vector<float> scale = {0.5f, 1.5f, 2.0f}, base = random_floats("base", width),
                             y = random_floats("y", rows * d);
    const std::vector<float> pre = random_floats("pre", rows * n), comb = random_floats("comb", rows * n * n);
    expect_conformance(
        "mhc_coefficients " + std::to_string(d),
        [&](ThreadPool& pool) {
          std::vector<float> out(static_cast<size_t>(rows * (2 * n + n * n)));
          MhcCoefficientsParams p;
          p.h = h.data();
          p.dots = dots.data();
          p.scale = scale.data();
          p.base = base.data();
          p.pre = out.data();
          p.post = out.data() + rows * n;
          p.comb = out.data() + 2 * rows * n;
          p.n_rows = rows;
          p.n_streams = n;
          p.d_model = d;
          p.sinkhorn_iters = 20;
          p.norm_eps = 1e-20;
          p.hc_eps = 1e-6f;
          mhc_coefficients(pool, p);
          return out;
        },
        [&](size_t) { return 1e-4; });  // 40 normalisations of values of order one, and logits of order ten
    expect_conformance(
        "mhc_collapse",
        [&](ThreadPool& pool) {
          std::vector<float> out(static_cast<size_t>(rows * d));
          mhc_collapse(pool, {h.data(), pre.data(), out.data(), rows, n, d});
          return out;
        },
        [&](size_t) { return 16.0 * kEps * 2.0; });
    expect_conformance(
        "mhc_expand",
        [&](ThreadPool& pool) {
          std::vector<float> out(static_cast<size_t>(rows * n * d));
          mhc_expand(pool, {y.data(), h.data(), pre.data(), comb.data(), out.data(), rows, n, d});
          return out;
        },
        [&](size_t) { return 24.0 * kEps * 2.0; });
  }
}

TEST(OpsMhc, columns_of_comb_sum_to_one_last) {
  ThreadPool pool(1);
  const std::vector<float> h = random_floats("h", 4 * 8), dots = random_floats("dots", 24, 5.0f), base(24, 0.0f),
                           scale(3, 1.0f);
  std::vector<float> pre(4), post(4), comb(16);
  MhcCoefficientsParams p;
  p.h = h.data();
  p.dots = dots.data();
  p.scale = scale.data();
  p.base = base.data();
  p.pre = pre.data();
  p.post = post.data();
  p.comb = comb.data();
  p.n_rows = 1;
  p.n_streams = 4;
  p.d_model = 8;
  p.sinkhorn_iters = 20;
  p.hc_eps = 1e-6f;
  mhc_coefficients(pool, p);
  for (size_t j = 0; j < 4; ++j) EXPECT_NEAR(comb[j] + comb[4 + j] + comb[8 + j] + comb[12 + j], 1.0f, 1e-5f);
}

TEST(OpsSwiglu, all_tiers_give_equal_bits_and_agree_with_the_reference) {
  for (const auto& [rows, d] : kSizes) {
    const std::vector<float> a = random_floats("a", rows * d, 20.0f), u = random_floats("u", rows * d, 20.0f),
                             g = random_floats("g", rows);
    for (const float* gate : {static_cast<const float*>(nullptr), g.data()}) {
      expect_conformance(
          "swiglu " + std::to_string(d),
          [&](ThreadPool& pool) {
            std::vector<float> z(a.size());
            swiglu(pool, {a.data(), u.data(), gate, z.data(), rows, d, 10.0f});
            return z;
          },
          [&](size_t) { return 100.0 * 4.0 * kEps; });
    }
  }
}

TEST(OpsSwiglu, clamps_before_the_activation_gate_from_above_only) {
  ThreadPool pool(1);
  const float a[3] = {100, -100, 2}, u[3] = {-100, 100, 3};
  float z[3];
  swiglu(pool, {a, u, nullptr, z, 1, 3, 2.5f});
  EXPECT_NEAR(z[0], 2.5 / (1 + std::exp(-2.5)) * -2.5, 1e-5);
  EXPECT_NEAR(z[1], 0.0, 1e-30);  // silu(-100), not silu(-2.5)
  EXPECT_NEAR(z[2], 2 / (1 + std::exp(-2.0)) * 2.5, 1e-5);
}

TEST(OpsRouter, all_tiers_choose_the_same_experts_and_agree_with_the_reference) {
  for (const auto& [rows, experts] : {std::pair<int64_t, int64_t>{0, 4}, {1, 1}, {7, 13}, {9, 384}}) {
    const int64_t active = std::min<int64_t>(6, experts);
    const std::vector<float> logits = random_floats("logits", rows * experts, 30.0f),
                             bias = random_floats("bias", experts, 0.5f);
    expect_conformance(
        "router " + std::to_string(experts),
        [&](ThreadPool& pool) {
          std::vector<float> scores(logits.size()), weights(static_cast<size_t>(rows * active));
          std::vector<int32_t> ids(weights.size());
          RouterParams p;
          p.logits = logits.data();
          p.bias = bias.data();
          p.scores = scores.data();
          p.ids = ids.data();
          p.weights = weights.data();
          p.n_rows = rows;
          p.n_experts = experts;
          p.n_active = active;
          p.scale = 1.5f;
          router(pool, p);
          std::vector<float> out = scores;
          out.insert(out.end(), weights.begin(), weights.end());
          out.insert(out.end(), ids.begin(), ids.end());
          return out;
        },
        [&](size_t) { return 6.0 * 8.0 * kEps; });
  }
}

TEST(OpsRouter, the_bias_chooses_but_does_not_weigh_and_ties_go_to_the_lower_id) {
  ThreadPool pool(1);
  const float logits[4] = {1, 1, 1, 1}, bias[4] = {0, 0, 5, 0};
  float scores[4], weights[2];
  int32_t ids[2];
  RouterParams p;
  p.logits = logits;
  p.bias = bias;
  p.scores = scores;
  p.ids = ids;
  p.weights = weights;
  p.n_rows = 1;
  p.n_experts = 4;
  p.n_active = 2;
  p.scale = 1.5f;
  router(pool, p);
  EXPECT_EQ(ids[0], 0);
  EXPECT_EQ(ids[1], 2);
  EXPECT_FLOAT_EQ(weights[0], 0.75f);
  EXPECT_FLOAT_EQ(weights[1], 0.75f);
}

TEST(OpsEngramGate, all_tiers_give_equal_bits_and_agree_with_the_reference) {
  for (const auto& [rows, d] : kSizes) {
    const int64_t n = 4;
    const std::vector<float> h = random_floats("h", rows * n * d), kv = random_floats("kv", rows * (n + 1) * d);
    const std::vector<float> q = random_floats("q", n * d), k = random_floats("k", n * d);
    expect_conformance(
        "engram_gate " + std::to_string(d),
        [&](ThreadPool& pool) {
          std::vector<float> out = h;
          engram_gate(pool, {out.data(), kv.data(), q.data(), k.data(), rows, n, d, 1e-20});
          return out;
        },
        [&](size_t) { return 4.0 * kEps; });
  }
}

TEST(OpsFakeQuant, every_implementation_gives_the_bits_of_the_reference) {
  for (FakeQuantFormat format : {FakeQuantFormat::kAct, FakeQuantFormat::kFp4, FakeQuantFormat::kKv4}) {
    for (float scale : {1e-30f, 1e-6f, 1e-3f, 1.0f, 77.0f, 1e5f}) {
      for (const auto& [rows, d] : kSizes) {
        std::vector<float> x = random_floats("x" + std::to_string(scale), rows * d, scale);
        // Ties of both formats: eighths of the largest value's power of two.
        for (size_t i = 0; i < x.size(); i += 2) x[i] = scale * std::round(x[i] / scale * 64.0f) / 64.0f;
        expect_conformance(
            "fake_quant of values up to " + std::to_string(scale),
            [&](ThreadPool& pool) {
              std::vector<float> y = x;
              fake_quant(pool, {y.data(), rows, d, format});
              return y;
            },
            [&](size_t) { return 0.0; });
      }
    }
  }
  // Every tie and every code, by way of a group whose scale is 1.
  std::vector<float> x;
  for (int i = -96; i <= 96; ++i) x.push_back(static_cast<float>(i) / 16.0f);
  while (x.size() % 31 != 0) x.push_back(0.0f);
  std::vector<float> grouped;
  for (size_t i = 0; i < x.size(); ++i) {
    if (i % 31 == 0) grouped.push_back(6.0f);
    grouped.push_back(x[i]);
  }
  expect_conformance(
      "fp4 ties",
      [&](ThreadPool& pool) {
        std::vector<float> y = grouped;
        fake_quant(pool, {y.data(), 1, static_cast<int64_t>(y.size()), FakeQuantFormat::kFp4});
        return y;
      },
      [&](size_t) { return 0.0; });
}

TEST(OpsSelect, every_implementation_takes_the_best_with_ties_to_the_lower_index) {
  for (int64_t n : {0, 1, 7, 64, 301}) {
    std::vector<float> scores = random_floats("scores", n);
    for (size_t i = 0; i < scores.size(); i += 3) scores[i] = 0.0f;  // many exact ties
    std::vector<uint8_t> allowed(static_cast<size_t>(n / 4 + 1));
    for (size_t b = 0; b < allowed.size(); ++b) allowed[b] = b % 3 != 1;
    for (int64_t k : {1, 5, 24, 400}) {
      for (const uint8_t* mask : {static_cast<const uint8_t*>(nullptr), static_cast<const uint8_t*>(allowed.data())}) {
        std::vector<int32_t> expected, found;
        reference::select_top_k(scores.data(), n, k, mask, 4, expected);
        select_top_k(scores.data(), n, k, mask, 4, found);
        EXPECT_EQ(found, expected) << n << " " << k;
        EXPECT_TRUE(std::is_sorted(found.begin(), found.end()));
      }
      std::vector<uint8_t> expected(static_cast<size_t>(n / 4 + 3), 9), found(expected);
      reference::select_blocks(scores.data(), n, k, 4, expected.data(), static_cast<int64_t>(expected.size()));
      select_blocks(scores.data(), n, k, 4, found.data(), static_cast<int64_t>(found.size()));
      EXPECT_EQ(found, expected) << n << " " << k;
      if (n > 0) {
        EXPECT_EQ(found[static_cast<size_t>((n - 1) / 4)], 1) << "the newest block is always kept";
      }
    }
  }
}

}  // namespace
}  // namespace espalier::ops
