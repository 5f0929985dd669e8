// Arrays of more than 2^31 elements: what lies behind that border is computed as in a small array. Needs about 20 GB of free device memory.
#include "codec/cuda/rows_product.h"
#include "device/device.h"
#include "ops/cuda/attention.h"
#include "ops/cuda/attention_fast.h"
#include "ops/cuda/native_product.h"
#include "ops/cuda/rows.h"
#include "ops/cuda/selection.h"
#include "ops/cuda/streams.h"
#include "tensor/float_formats.h"
#include "tests/gpu/ops_data.h"

namespace espalier::ops {
namespace {

using cuda::NativeForm;

constexpr int64_t kBorder = int64_t{1} << 31;

class OpsCudaLarge : public OpsCuda {
 protected:
  void SetUp() override {
    const uint64_t free = taken(device::free_memory_bytes(0));
    if (free < (uint64_t{22} << 30)) GTEST_SKIP() << "needs 22 GiB of free device memory, " << (free >> 30) << " are";
  }
  // n floats of one small value, but for those in [begin, begin + values.size()).
  float* mostly_equal(int64_t n, int64_t begin, const std::vector<float>& values) {
    float* out = room<float>(n);
    must(stream_.fill_bytes(out, 0x3C, static_cast<size_t>(n) * sizeof(float)));
    must(stream_.copy_to_device(out + begin, values.data(), values.size() * sizeof(float)));
    return out;
  }
};

TEST_F(OpsCudaLarge, products_with_many_rows_of_logits) {
  const int64_t in = 64, out = 129280, rows = kBorder / out + 20;
  std::vector<uint16_t> bits;
  for (float v : random_floats("w", in * out)) bits.push_back(encode_bf16(v));
  cuda::NativeWeight w;
  w.form = NativeForm::kBf16, w.in = in, w.out = out, w.weight = reinterpret_cast<const uint8_t*>(up(bits));
  const std::vector<float> x = random_floats("x", rows * in);
  const float* x_there = up(x);
  float *y = room<float>(rows * out), *one = room<float>(out);
  for (bool is_fast : {false, true}) {
    const auto multiply = [&](const float* from, float* to, int64_t n) {
      if (is_fast) return must(cuda::multiply_native_fast(stream_, {w, from, in, to, out, n}));
      codec::cuda::RowsProductParams p;
      p.weight = codec::cuda::weight_of(w);
      p.x = from, p.x_stride = in, p.y = to, p.y_stride = out, p.n_rows = n;
      must(codec::cuda::multiply_rows(stream_, p));
    };
    must(stream_.fill_bytes(y, 0xFF, static_cast<size_t>(rows * out) * sizeof(float)));
    multiply(x_there, y, rows);
    for (int64_t t : {int64_t{0}, kBorder / out, rows - 1}) {  // the middle one lies across the border
      multiply(x_there + t * in, one, 1);
      EXPECT_EQ(bit_differences(down(y + t * out, out), down(one, out)), "") << "row " << t << (is_fast ? " fast" : "");
    }
  }
}

TEST_F(OpsCudaLarge, products_with_a_weight_of_many_elements) {
  const int64_t in = 5120, out = kBorder / in + 300;
  const size_t size = static_cast<size_t>(in * out) * 2;
  uint8_t* bytes = room<uint8_t>(static_cast<int64_t>(size));
  must(stream_.fill_bytes(bytes, 0x3C, size));
  std::vector<uint16_t> tail;
  for (float v : random_floats("w", 200 * in)) tail.push_back(encode_bf16(v));
  must(stream_.copy_to_device(bytes + size - tail.size() * 2, tail.data(), tail.size() * 2));
  cuda::NativeWeight w;
  w.form = NativeForm::kBf16, w.in = in, w.out = out, w.weight = bytes;
  cuda::NativeWeight last = w;
  last.out = 200, last.weight = bytes + size - tail.size() * 2;
  const float* x = up(random_floats("x", in));
  float *y = room<float>(out), *expected = room<float>(200);
  codec::cuda::RowsProductParams p;
  p.weight = codec::cuda::weight_of(w), p.x = x, p.x_stride = in, p.y = y, p.y_stride = out, p.n_rows = 1;
  must(codec::cuda::multiply_rows(stream_, p));
  p.weight = codec::cuda::weight_of(last), p.y = expected, p.y_stride = 200;
  must(codec::cuda::multiply_rows(stream_, p));
  EXPECT_EQ(bit_differences(down(y + out - 200, 200), down(expected, 200)), "");
}

TEST_F(OpsCudaLarge, streams_and_norms_of_many_rows) {
  const int64_t n = 4, d = 5120, rows = kBorder / (n * d) + 2;
  const std::vector<float> last = random_floats("h", n * d), y_last = random_floats("y", d);
  const float* h = mostly_equal(rows * n * d, (rows - 1) * n * d, last);
  const float* y = mostly_equal(rows * d, (rows - 1) * d, y_last);
  const std::vector<float> post_last = random_floats("post", n), comb_last = random_floats("comb", n * n);
  const float* post = mostly_equal(rows * n, (rows - 1) * n, post_last);
  const float* comb = mostly_equal(rows * n * n, (rows - 1) * n * n, comb_last);
  float *out = room<float>(rows * n * d), *expected = room<float>(n * d);
  must(cuda::mhc_expand(stream_, {y, h, post, comb, out, rows, n, d}));
  must(cuda::mhc_expand(stream_, {up(y_last), up(last), up(post_last), up(comb_last), expected, 1, n, d}));
  EXPECT_EQ(bit_differences(down(out + (rows - 1) * n * d, n * d), down(expected, n * d)), "");
  const float* weight = up(random_floats("weight", d));
  must(cuda::rms_norm(stream_, {h, weight, out, rows * n, d, 1e-20}));
  must(cuda::rms_norm(stream_, {up(last), weight, expected, n, d, 1e-20}));
  EXPECT_EQ(bit_differences(down(out + (rows - 1) * n * d, n * d), down(expected, n * d)), "");
}

TEST_F(OpsCudaLarge, attention_of_many_rows) {
  const int64_t heads = 64, d = 512, rows = kBorder / (heads * d) + 3;
  const std::vector<float> last = random_floats("q", heads * d);
  const float* q = mostly_equal(rows * heads * d, (rows - 1) * heads * d, last);
  const float* kv = up(random_floats("kv", 3 * d));
  std::vector<const float*> keys;
  std::vector<int64_t> begin = {0};
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t j = 0; j < 3; ++j) keys.push_back(kv + j * d);
    begin.push_back(3 * (t + 1));
  }
  AttentionParams p;
  p.q = q, p.keys = up(keys), p.key_begin = up(begin), p.sink = up(random_floats("sink", heads)), p.out = room<float>(rows * heads * d);
  p.n_rows = rows, p.n_heads = heads, p.head_dim = d, p.scale = 0.04f;
  AttentionParams one = p;
  one.q = up(last), one.n_rows = 1, one.out = room<float>(heads * d);
  must(cuda::attention(stream_, p, 3));
  must(cuda::attention(stream_, one, 3));
  EXPECT_EQ(bit_differences(down(p.out + (rows - 1) * heads * d, heads * d), down(one.out, heads * d)), "");
  must(stream_.fill_bytes(p.out, 0xFF, static_cast<size_t>(rows * heads * d) * sizeof(float)));
  must(cuda::attention_fast(stream_, p, 3, nullptr));
  must(cuda::attention_fast(stream_, one, 3, room<float>(cuda::attention_parts_size(one, 3))));
  EXPECT_EQ(bit_differences(down(p.out + (rows - 1) * heads * d, heads * d), down(one.out, heads * d)), "");
}

TEST_F(OpsCudaLarge, scores_and_choices_behind_the_border) {
  const int64_t heads = 32, dim = 128, entries = 1000, begin = kBorder + 7;
  IndexScoresParams p;
  p.queries = up(random_floats("q", heads * dim)), p.weights = up(random_floats("w", heads));
  p.key_panels = up(random_floats("keys", (entries + 31) / 32 * 32 * dim));
  p.n_visible = up(std::vector<int64_t>{entries}), p.out_begin = up(std::vector<int64_t>{begin}), p.out = room<float>(begin + entries);
  p.n_rows = 1, p.n_heads = heads, p.dim = dim;
  must(cuda::index_scores(stream_, p, entries));
  cuda::SelectParams s;
  s.scores = p.out, s.begin = p.out_begin, s.n = p.n_visible, s.k = 100, s.entries = room<int32_t>(100), s.entries_stride = 100;
  s.n_selected = room<int64_t>(1), s.n_rows = 1;
  must(cuda::select_top_k(stream_, s));
  const std::vector<float> scores = down(p.out + begin, entries);
  const std::vector<int32_t> chosen = down(s.entries, 100);
  p.out_begin = up(std::vector<int64_t>{0}), p.out = room<float>(entries);
  must(cuda::index_scores(stream_, p, entries));
  EXPECT_EQ(bit_differences(scores, down(p.out, entries)), "");
  s.scores = p.out, s.begin = p.out_begin;
  must(cuda::select_top_k(stream_, s));
  EXPECT_EQ(chosen, down(s.entries, 100));
  EXPECT_EQ(down(s.n_selected, 1), std::vector<int64_t>{100});
}

}  // namespace
}  // namespace espalier::ops
