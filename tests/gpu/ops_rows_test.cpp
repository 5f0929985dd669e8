// Row-wise operations on the GPU with the cases of tests/conformance and the released sizes.
#include "ops/cuda/rows.h"

#include "ops/cuda/streams.h"
#include "tests/gpu/ops_data.h"

namespace espalier::ops {
namespace {

using Sizes = std::vector<std::pair<int64_t, int64_t>>;
const Sizes kSizes = {{0, 8}, {1, 1}, {2, 15}, {3, 16}, {5, 17}, {4, 127}, {33, 256}, {1, 5120}, {17, 1280}, {2, 4097}};

TEST_F(OpsCuda, rms_norm_has_the_bits_of_the_cpu) {
  Sizes sizes = kSizes;
  sizes.push_back({3, 20480});
  for (const auto& [rows, d] : sizes) {
    for (float size : {1e-8f, 1.0f, 1e4f}) {
      const std::vector<float> x = random_floats("x", rows * d, size), w = random_floats("w", d);
      float* y = room<float>(rows * d);
      must(cuda::rms_norm(stream_, {up(x), up(w), y, rows, d, 1e-20}));
      expect_conformance("rms_norm " + std::to_string(rows) + " x " + std::to_string(d), down(y, rows * d),
                         [&, rows = rows, d = d](ThreadPool& pool) {
                           std::vector<float> out(x.size());
                           rms_norm(pool, {x.data(), w.data(), out.data(), rows, d, 1e-20});
                           return out;
                         },
                         [&, d = d](size_t) { return 8.0 * std::sqrt(static_cast<double>(d)) * kEps; });
    }
  }
}

TEST_F(OpsCuda, rms_norm_works_in_place) {
  const std::vector<float> x = random_floats("in place", 5 * 300), w = random_floats("w", 300);
  float* both = up(x);
  float* apart = room<float>(5 * 300);
  const float* weight = up(w);
  must(cuda::rms_norm(stream_, {both, weight, apart, 5, 300, 1e-20}));
  must(cuda::rms_norm(stream_, {both, weight, both, 5, 300, 1e-20}));
  EXPECT_EQ(bit_differences(down(both, 1500), down(apart, 1500)), "");
}

TEST_F(OpsCuda, rope_has_the_bits_of_the_cpu) {
  struct Case {
    int64_t rows, heads, rope_dim, head_dim;
  };
  for (const Case& c : {Case{0, 3, 8, 13}, Case{1, 3, 2, 7}, Case{3, 3, 10, 15}, Case{17, 3, 64, 69}, Case{5, 64, 64, 512}, Case{2, 32, 64, 128}}) {
    for (bool is_inverse : {false, true}) {
      const std::vector<float> f = yarn_frequencies(c.rope_dim, 160000, {16, 32, 1, 65536});
      const std::vector<float> x = random_floats("x", c.rows * c.heads * c.head_dim);
      std::vector<int64_t> positions;
      for (int64_t t = 0; t < c.rows; ++t) positions.push_back(t * t * 3571 % 1048576);
      float* y = up(x);
      must(cuda::rope(stream_, {y, up(positions), c.rows, c.heads, c.head_dim, c.rope_dim, up(f), is_inverse}));
      expect_conformance("rope " + std::to_string(c.rope_dim), down(y, static_cast<int64_t>(x.size())),
                         [&](ThreadPool& pool) {
                           std::vector<float> out = x;
                           rope(pool, {out.data(), positions.data(), c.rows, c.heads, c.head_dim, c.rope_dim, f.data(), is_inverse});
                           return out;
                         },
                         [](size_t) { return 4.0 * kEps; });
    }
  }
}

TEST_F(OpsCuda, swiglu_has_the_bits_of_the_cpu) {
  Sizes sizes = kSizes;
  sizes.push_back({6, 2304});
  for (const auto& [rows, d] : sizes) {
    const std::vector<float> a = random_floats("a", rows * d, 20.0f), u = random_floats("u", rows * d, 20.0f), g = random_floats("g", rows);
    for (bool has_gate : {false, true}) {
      float* z = room<float>(rows * d);
      must(cuda::swiglu(stream_, {up(a), up(u), has_gate ? up(g) : nullptr, z, rows, d, 10.0f}));
      expect_conformance("swiglu " + std::to_string(d), down(z, rows * d),
                         [&, rows = rows, d = d](ThreadPool& pool) {
                           std::vector<float> out(a.size());
                           swiglu(pool, {a.data(), u.data(), has_gate ? g.data() : nullptr, out.data(), rows, d, 10.0f});
                           return out;
                         },
                         [](size_t) { return 100.0 * 4.0 * kEps; });
    }
  }
}

TEST_F(OpsCuda, fake_quant_has_the_bits_of_the_reference) {
  for (FakeQuantFormat format : {FakeQuantFormat::kAct, FakeQuantFormat::kFp4, FakeQuantFormat::kKv4}) {
    for (float size : {1e-30f, 1e-6f, 1e-3f, 1.0f, 77.0f, 1e5f}) {
      for (const auto& [rows, d] : Sizes{{0, 8}, {1, 1}, {3, 16}, {5, 17}, {4, 127}, {17, 512}, {1, 5120}}) {
        std::vector<float> x = random_floats("x" + std::to_string(size), rows * d, size);
        for (size_t i = 0; i < x.size(); i += 2) x[i] = size * std::round(x[i] / size * 64.0f) / 64.0f;  // ties
        float* y = up(x);
        must(cuda::fake_quant(stream_, {y, rows, d, format}));
        expect_conformance("fake_quant of values up to " + std::to_string(size), down(y, rows * d),
                           [&, rows = rows, d = d](ThreadPool& pool) {
                             std::vector<float> out = x;
                             fake_quant(pool, {out.data(), rows, d, format});
                             return out;
                           },
                           [](size_t) { return 0.0; });
      }
    }
  }
}

TEST_F(OpsCuda, rounding_to_bf16_has_the_bits_of_the_cpu) {
  std::vector<float> x = random_floats("bf16", 100001, 3.0f);
  x.insert(x.end(), {0.0f, -0.0f, INFINITY, -INFINITY, 0x1p-149f, 1.00390625f, 1.01171875f, 0x1.fffffep127f});
  float* y = up(x);
  must(cuda::round_to_bf16(stream_, y, static_cast<int64_t>(x.size())));
  std::vector<float> expected = x;
  round_to_bf16(pool_, expected.data(), static_cast<int64_t>(expected.size()));
  EXPECT_EQ(bit_differences(down(y, static_cast<int64_t>(x.size())), expected), "");
}

TEST_F(OpsCuda, mhc_has_the_bits_of_the_cpu) {
  for (const auto& [rows, d] : kSizes) {
    for (int64_t n : {1, 4, 8}) {
      if (n != 4 && d > 300) continue;
      const int64_t width = n * (2 + n), n_out = rows * (2 * n + n * n);
      const std::vector<float> h = random_floats("h", rows * n * d, 2.0f), dots = random_floats("dots", rows * width, 3.0f);
      const std::vector<float> scale = {0.5f, 1.5f, 2.0f}, base = random_floats("base", width), y = random_floats("y", rows * d);
      const std::vector<float> pre = random_floats("pre", rows * n), comb = random_floats("comb", rows * n * n);
      const std::string what = std::to_string(rows) + " rows of " + std::to_string(n) + " x " + std::to_string(d);
      const auto params = [&, rows = rows, d = d](const float* hs, const float* ds, const float* ss, const float* bs, float* out) {
        MhcCoefficientsParams p;
        p.h = hs;
        p.dots = ds;
        p.scale = ss;
        p.base = bs;
        p.pre = out;
        p.post = out + rows * n;
        p.comb = out + 2 * rows * n;
        p.n_rows = rows;
        p.n_streams = n;
        p.d_model = d;
        p.sinkhorn_iters = 20;
        p.norm_eps = 1e-20;
        p.hc_eps = 1e-6f;
        return p;
      };
      float* out = room<float>(n_out);
      must(cuda::mhc_coefficients(stream_, params(up(h), up(dots), up(scale), up(base), out)));
      expect_conformance("mhc_coefficients " + what, down(out, n_out),
                         [&](ThreadPool& pool) {
                           std::vector<float> values(static_cast<size_t>(n_out));
                           mhc_coefficients(pool, params(h.data(), dots.data(), scale.data(), base.data(), values.data()));
                           return values;
                         },
                         [](size_t) { return 1e-4; });
      float* collapsed = room<float>(rows * d);
      must(cuda::mhc_collapse(stream_, {up(h), up(pre), collapsed, rows, n, d}));
      expect_conformance("mhc_collapse " + what, down(collapsed, rows * d),
                         [&, rows = rows, d = d](ThreadPool& pool) {
                           std::vector<float> values(static_cast<size_t>(rows * d));
                           mhc_collapse(pool, {h.data(), pre.data(), values.data(), rows, n, d});
                           return values;
                         },
                         [&](size_t) { return 8.0 * static_cast<double>(n) * kEps; });
      float* expanded = room<float>(rows * n * d);
      must(cuda::mhc_expand(stream_, {up(y), up(h), up(pre), up(comb), expanded, rows, n, d}));
      expect_conformance("mhc_expand " + what, down(expanded, rows * n * d),
                         [&, rows = rows, d = d](ThreadPool& pool) {
                           std::vector<float> values(static_cast<size_t>(rows * n * d));
                           mhc_expand(pool, {y.data(), h.data(), pre.data(), comb.data(), values.data(), rows, n, d});
                           return values;
                         },
                         [&](size_t) { return 12.0 * static_cast<double>(n) * kEps; });
    }
  }
}

TEST_F(OpsCuda, mhc_refuses_more_streams_than_it_has_room_for) {
  MhcCoefficientsParams p;
  p.n_rows = 1;
  p.n_streams = kMaxStreams + 1;
  EXPECT_EQ(cuda::mhc_coefficients(stream_, p).code(), StatusCode::kInvalidArgument);
}

TEST_F(OpsCuda, engram_gate_has_the_bits_of_the_cpu) {
  for (const auto& [rows, d] : kSizes) {
    const int64_t n = 4;
    const std::vector<float> h = random_floats("h", rows * n * d), kv = random_floats("kv", rows * (n + 1) * d);
    const std::vector<float> q = random_floats("q", n * d), k = random_floats("k", n * d);
    float* out = up(h);
    must(cuda::engram_gate(stream_, {out, up(kv), up(q), up(k), rows, n, d, 1e-20}));
    expect_conformance("engram_gate " + std::to_string(d), down(out, rows * n * d),
                       [&, rows = rows, d = d](ThreadPool& pool) {
                         std::vector<float> values = h;
                         engram_gate(pool, {values.data(), kv.data(), q.data(), k.data(), rows, n, d, 1e-20});
                         return values;
                       },
                       [](size_t) { return 4.0 * kEps; });
  }
}

}  // namespace
}  // namespace espalier::ops
