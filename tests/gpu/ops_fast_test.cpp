// The operations in the order of sums that many threads share: within roundings of the CPU's order, and every row by itself.
#include <algorithm>

#include "codec/cuda/rows_product.h"
#include "ops/cuda/attention.h"
#include "ops/cuda/attention_fast.h"
#include "ops/cuda/native_product.h"
#include "ops/cuda/rows.h"
#include "ops/cuda/streams.h"
#include "tests/gpu/ops_data.h"

namespace espalier::ops {
namespace {

using cuda::NativeForm;
using cuda::Order;

class OpsCudaFast : public OpsCuda {
 protected:
  // ||got - expected|| / ||expected||; NaN anywhere fails every bound.
  static double relative_error(const std::vector<float>& got, const std::vector<float>& expected) {
    double error = 0, power = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      const double d = double{got[i]} - double{expected[i]};
      error += d * d, power += double{expected[i]} * double{expected[i]};
    }
    return got.size() == expected.size() ? std::sqrt(error / power) : 1e9;
  }

  cuda::NativeWeight random_weight(NativeForm form, int64_t in, int64_t out) {
    const CounterRng rng(31, "weight");
    cuda::NativeWeight w;
    w.form = form, w.in = in, w.out = out;
    const int64_t n = in * out;
    if (form == NativeForm::kF32) {
      w.weight = reinterpret_cast<const uint8_t*>(up(random_floats("w", n)));
      return w;
    }
    std::vector<uint8_t> bytes;
    const int64_t size = form == NativeForm::kFp8 ? n : form == NativeForm::kMxfp4 ? n / 2 : 2 * n;
    for (int64_t i = 0; i < size; ++i) bytes.push_back(static_cast<uint8_t>(rng.bits(static_cast<uint64_t>(i)) & 0xBF));
    if (form == NativeForm::kBf16 || form == NativeForm::kF16) {  // exponents around one
      for (int64_t i = 1; i < size; i += 2) bytes[static_cast<size_t>(i)] = static_cast<uint8_t>((bytes[static_cast<size_t>(i)] & 0x83) | (form == NativeForm::kBf16 ? 0x3C : 0x38));
    }
    w.weight = up(bytes);
    if (form == NativeForm::kFp8 || form == NativeForm::kMxfp4) {
      w.block_rows = form == NativeForm::kFp8 ? 32 : 1;
      w.scale_cols = (in + 31) / 32;
      std::vector<uint8_t> scales;
      for (int64_t i = 0; i < (out + w.block_rows - 1) / w.block_rows * w.scale_cols; ++i) scales.push_back(static_cast<uint8_t>(120 + rng.bits(static_cast<uint64_t>(i)) % 12));
      w.scale = up(scales);
    }
    return w;
  }
};

TEST_F(OpsCudaFast, native_products_are_within_roundings_and_rows_stand_alone) {
  struct Size {
    int64_t in, out;
  };
  for (NativeForm form : {NativeForm::kF32, NativeForm::kF16, NativeForm::kBf16, NativeForm::kFp8, NativeForm::kMxfp4}) {
    for (const Size& s : {Size{32, 1}, Size{96, 5}, Size{20480, 24}, Size{5120, 384}, Size{512, 128}, Size{2304, 2501}}) {
      const std::string what = "form " + std::to_string(static_cast<int>(form)) + " " + std::to_string(s.in) + " x " + std::to_string(s.out);
      const cuda::NativeWeight w = random_weight(form, s.in, s.out);
      constexpr int64_t kRows = 11;
      const float* x = up(random_floats("x" + what, kRows * s.in));
      float *y = room<float>(kRows * s.out), *exact = room<float>(kRows * s.out);
      must(cuda::multiply_native_fast(stream_, {w, x, s.in, y, s.out, kRows}));
      codec::cuda::RowsProductParams p;
      p.weight = codec::cuda::weight_of(w);
      p.x = x, p.x_stride = s.in, p.y = exact, p.y_stride = s.out, p.n_rows = kRows;
      must(codec::cuda::multiply_rows(stream_, p));
      const std::vector<float> all = down(y, kRows * s.out);
      // The CPU's one chain of s.in additions is the less exact of the two.
      EXPECT_LT(relative_error(all, down(exact, kRows * s.out)), 3e-8 * std::sqrt(static_cast<double>(s.in)) + 1e-6) << what;
      for (int64_t n : {1, 2, 3, 5, 8}) {
        float* few = room<float>(n * s.out);
        must(cuda::multiply_native_fast(stream_, {w, x + 2 * s.in, s.in, few, s.out, n}));
        EXPECT_EQ(bit_differences(down(few, n * s.out), {all.begin() + 2 * s.out, all.begin() + (2 + n) * s.out}), "") << what << ", " << n << " rows";
      }
    }
  }
}

TEST_F(OpsCudaFast, a_product_that_does_not_come_in_eights_is_refused) {
  const cuda::NativeWeight w = random_weight(NativeForm::kF32, 36, 4);
  const float* x = up(random_floats("x", 36));
  EXPECT_FALSE(cuda::can_multiply_fast(w, x, 36));
  EXPECT_EQ(cuda::multiply_native_fast(stream_, {w, x, 36, room<float>(4), 4, 1}).code(), StatusCode::kInvalidArgument);
}

TEST_F(OpsCudaFast, attention_is_within_roundings_and_rows_stand_alone) {
  struct Size {
    int64_t rows, heads, dim, places;
  };
  for (const Size& s : {Size{5, 3, 128, 70}, Size{3, 9, 256, 33}, Size{4, 64, 512, 640}, Size{20, 64, 512, 160}}) {
    const std::string what = std::to_string(s.rows) + " rows, " + std::to_string(s.heads) + " heads of " + std::to_string(s.dim);
    const float* q = up(random_floats("q" + what, s.rows * s.heads * s.dim, 3.0f));
    const float* sink = up(random_floats("sink" + what, s.heads, 2.0f));
    const float* kv = up(random_floats("kv" + what, s.places * s.dim, 2.0f));
    // Every seventh place is empty, in row 1 all of them, in row 2 the second tile.
    std::vector<const float*> keys;
    std::vector<int64_t> begin = {0};
    for (int64_t t = 0; t < s.rows; ++t) {
      for (int64_t j = 0; j < s.places; ++j) {
        const bool is_empty = j % 7 == 6 || t == 1 || (t == 2 && j >= 32 && j < 64);
        keys.push_back(is_empty ? nullptr : kv + (j * 5 + t) % s.places * s.dim);
      }
      begin.push_back(static_cast<int64_t>(keys.size()));
    }
    AttentionParams p;
    p.q = q, p.sink = sink, p.keys = up(keys), p.key_begin = up(begin);
    p.n_rows = s.rows, p.n_heads = s.heads, p.head_dim = s.dim, p.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(s.dim)));
    const int64_t size = s.rows * s.heads * s.dim, row = s.heads * s.dim;
    p.out = room<float>(size);
    must(cuda::attention(stream_, p, s.places));
    const std::vector<float> exact = down(p.out, size);
    ASSERT_TRUE(cuda::can_attend_fast(p));
    p.out = room<float>(size);
    must(cuda::attention_fast(stream_, p, s.places, room<float>(cuda::attention_parts_size(p, s.places))));
    const std::vector<float> all = down(p.out, size);
    EXPECT_LT(relative_error(all, exact), 2e-6) << what;
    // Alone, and with empty places behind: up to eight rows have a block per tile, more rows one for all tiles.
    for (int64_t t : {int64_t{0}, int64_t{1}, s.rows - 1}) {
      AttentionParams one = p;
      std::vector<const float*> longer(keys.begin() + t * s.places, keys.begin() + (t + 1) * s.places);
      longer.resize(static_cast<size_t>(s.places) + 90, nullptr);
      one.q = q + t * row, one.keys = up(longer), one.key_begin = up(std::vector<int64_t>{0, s.places + 90});
      one.n_rows = 1, one.out = room<float>(row);
      must(cuda::attention_fast(stream_, one, s.places + 90, room<float>(cuda::attention_parts_size(one, s.places + 90))));
      EXPECT_EQ(bit_differences(down(one.out, row), {all.begin() + t * row, all.begin() + (t + 1) * row}), "") << what << ", row " << t;
    }
  }
}

TEST_F(OpsCudaFast, statistics_are_within_roundings) {
  for (int64_t d : {31, 512, 5120}) {
    const int64_t rows = 3;
    const float *x = up(random_floats("x", rows * d)), *weight = up(random_floats("w", d));
    float *exact = room<float>(rows * d), *fast = room<float>(rows * d);
    must(cuda::rms_norm(stream_, {x, weight, exact, rows, d, 1e-20}));
    must(cuda::rms_norm(stream_, {x, weight, fast, rows, d, 1e-20}, Order::kFast));
    EXPECT_LT(relative_error(down(fast, rows * d), down(exact, rows * d)), 1e-6) << d;

    const int64_t n = 4, width = n * (n + 2);
    MhcCoefficientsParams p;
    p.h = up(random_floats("h", rows * n * d)), p.dots = up(random_floats("dots", rows * width, 20.0f));
    p.scale = up(random_floats("scale", 3)), p.base = up(random_floats("base", width));
    p.n_rows = rows, p.n_streams = n, p.d_model = d, p.sinkhorn_iters = 20, p.norm_eps = 1e-20, p.hc_eps = 1e-6f;
    std::vector<float> results[2];
    for (int i = 0; i < 2; ++i) {
      p.pre = room<float>(rows * n), p.post = room<float>(rows * n), p.comb = room<float>(rows * n * n);
      must(cuda::mhc_coefficients(stream_, p, i == 0 ? Order::kCpu : Order::kFast));
      for (const auto& part : {down(p.pre, rows * n), down(p.post, rows * n), down(p.comb, rows * n * n)}) results[i].insert(results[i].end(), part.begin(), part.end());
    }
    EXPECT_LT(relative_error(results[1], results[0]), 1e-5) << d;

    const std::vector<float> h = random_floats("streams", rows * n * d);
    EngramGateParams g;
    g.kv = up(random_floats("kv", rows * (n + 1) * d)), g.q_weight = up(random_floats("q", n * d)), g.k_weight = up(random_floats("k", n * d));
    g.n_rows = rows, g.n_streams = n, g.d_model = d, g.norm_eps = 1e-20;
    for (int i = 0; i < 2; ++i) {
      float* streams = up(h);
      g.h = streams;
      must(cuda::engram_gate(stream_, g, i == 0 ? Order::kCpu : Order::kFast));
      results[i] = down(streams, rows * n * d);
    }
    EXPECT_LT(relative_error(results[1], results[0]), 1e-5) << d;
  }
}

TEST_F(OpsCudaFast, collapsing_and_normalising_in_one_launch_is_the_two_steps) {
  for (int64_t d : {33, 36, 5120, 8192, 8200}) {
    const int64_t rows = 3, n = 4;
    const float *h = up(random_floats("h", rows * n * d)), *w = up(random_floats("w", rows * n)), *weight = up(random_floats("weight", d));
    float* two = room<float>(rows * d);
    must(cuda::mhc_collapse(stream_, {h, w, two, rows, n, d}));
    must(cuda::rms_norm(stream_, {two, weight, two, rows, d, 1e-20}));
    const std::vector<float> expected = down(two, rows * d);
    for (Order order : {Order::kCpu, Order::kFast}) {
      float* one = room<float>(rows * d);
      must(cuda::mhc_collapse_normalised(stream_, {h, w, one, rows, n, d}, weight, 1e-20, order));
      const std::vector<float> got = down(one, rows * d);
      if (order == Order::kCpu) {
        EXPECT_EQ(bit_differences(got, expected), "") << d;
      }
      EXPECT_LT(relative_error(got, expected), 1e-6) << d;
      for (int64_t t = 0; t < rows && d % 4 == 0; ++t) {  // a row alone
        float* alone = room<float>(d);
        must(cuda::mhc_collapse_normalised(stream_, {h + t * n * d, w + t * n, alone, 1, n, d}, weight, 1e-20, order));
        EXPECT_EQ(bit_differences(down(alone, d), {got.begin() + t * d, got.begin() + (t + 1) * d}), "") << d << ", row " << t;
      }
    }
  }
}

}  // namespace
}  // namespace espalier::ops
