// Attention, pooling, scores and choices on the GPU with the cases of tests/conformance and the released sizes.
#include "ops/cuda/attention.h"

#include <algorithm>

#include "ops/cuda/selection.h"
#include "ops/select.h"
#include "tests/gpu/ops_data.h"

namespace espalier::ops {
namespace {

struct Size {
  int64_t rows, heads, dim, most_keys;
};

// Row t has (37 t + 3) mod (most_keys + 1) keys, so empty lists occur; every fifth place is empty in the online form.
class OpsCudaAttention : public OpsCuda {
 protected:
  void check(const Size& s, bool is_online) {
    const std::string what = std::string(is_online ? "online " : "") + "attention " + std::to_string(s.rows) + " rows, " +
                             std::to_string(s.heads) + " heads of " + std::to_string(s.dim) + ", up to " + std::to_string(s.most_keys) + " keys";
    const std::vector<float> q = random_floats("q" + what, s.rows * s.heads * s.dim, 3.0f);
    const std::vector<float> kv = random_floats("kv" + what, (s.most_keys + 1) * s.dim, 2.0f), sink = random_floats("sink" + what, s.heads, 2.0f);
    const float* kv_there = up(kv);
    std::vector<const float*> keys, keys_there;
    std::vector<int64_t> begin = {0};
    for (int64_t t = 0; t < s.rows; ++t) {
      for (int64_t j = 0; j < (t * 37 + 3) % (s.most_keys + 1); ++j) {
        const bool is_empty = is_online && j % 5 == 4;
        const int64_t row = (j * 7 + t) % (s.most_keys + 1) * s.dim;
        keys.push_back(is_empty ? nullptr : kv.data() + row);
        keys_there.push_back(is_empty ? nullptr : kv_there + row);
      }
      begin.push_back(static_cast<int64_t>(keys.size()));
    }
    AttentionParams p;
    p.n_rows = s.rows;
    p.n_heads = s.heads;
    p.head_dim = s.dim;
    p.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(s.dim)));
    p.is_online = is_online;
    AttentionParams there = p;
    there.q = up(q);
    there.keys = up(keys_there);
    there.key_begin = up(begin);
    there.sink = up(sink);
    there.out = room<float>(static_cast<int64_t>(q.size()));
    must(cuda::attention(stream_, there, s.most_keys));
    expect_conformance(what, down(there.out, static_cast<int64_t>(q.size())),
                       [&](ThreadPool& pool) {
                         std::vector<float> out(q.size(), 99.0f);
                         p.q = q.data();
                         p.keys = keys.data();
                         p.key_begin = begin.data();
                         p.sink = sink.data();
                         p.out = out.data();
                         attention(pool, p);
                         return out;
                       },
                       [&](size_t) {
                         const double score = static_cast<double>(s.dim) * kEps * 6.0 * std::sqrt(static_cast<double>(s.dim));
                         return 2.0 * (2.0 * score + static_cast<double>(s.most_keys + 8) * kEps) + (is_online ? 2.0 * 0x1p-8 : 0.0);
                       });
  }
};

TEST_F(OpsCudaAttention, has_the_bits_of_the_cpu) {
  for (const Size& s : {Size{0, 2, 16, 4}, Size{1, 1, 1, 1}, Size{3, 5, 7, 3}, Size{7, 4, 128, 40}, Size{5, 6, 33, 130}, Size{2, 64, 64, 70},
                        Size{17, 64, 512, 640}}) {
    check(s, false);
    check(s, true);
  }
}

TEST_F(OpsCudaAttention, long_lists_use_more_shared_memory) { check(Size{3, 3, 24, 2500}, false); }

TEST_F(OpsCudaAttention, trailing_empty_places_change_nothing) {
  const int64_t dim = 40, n = 70, padded = 150;
  const std::vector<float> q = random_floats("pad q", dim), kv = random_floats("pad kv", n * dim), sink = {0.5f};
  const float* kv_there = up(kv);
  std::vector<const float*> keys(static_cast<size_t>(padded), nullptr);
  for (int64_t j = 0; j < n; ++j) keys[static_cast<size_t>(j)] = kv_there + j * dim;
  const float* const* keys_there = up(keys);
  for (bool is_online : {false, true}) {
    std::vector<std::vector<float>> out;
    for (int64_t places : {n, padded}) {
      AttentionParams p;
      p.q = up(q);
      p.keys = keys_there;
      p.key_begin = up(std::vector<int64_t>{0, places});
      p.sink = up(sink);
      p.out = room<float>(dim);
      p.n_rows = 1;
      p.n_heads = 1;
      p.head_dim = dim;
      p.scale = 0.3f;
      p.is_online = is_online;
      must(cuda::attention(stream_, p, places));
      out.push_back(down(p.out, dim));
    }
    EXPECT_EQ(bit_differences(out[1], out[0]), "") << is_online;
  }
}

TEST_F(OpsCudaAttention, a_list_that_no_block_can_hold_is_refused) {
  AttentionParams p;
  p.n_rows = 1;
  p.n_heads = 4;
  EXPECT_EQ(cuda::attention(stream_, p, 1 << 20).code(), StatusCode::kInvalidArgument);
}

TEST_F(OpsCuda, compress_group_has_the_bits_of_the_cpu) {
  for (const auto& [groups, ratio, d] : {std::tuple<int64_t, int64_t, int64_t>{0, 2, 8}, {1, 1, 1}, {3, 2, 13}, {5, 4, 128}, {129, 2, 512}}) {
    const std::vector<float> kv = random_floats("kv", groups * ratio * d, 3.0f), gate = random_floats("gate", groups * ratio * d, 10.0f);
    const float *kv_there = up(kv), *gate_there = up(gate);
    std::vector<const float*> kv_rows, gate_rows, kv_rows_there, gate_rows_there;
    for (int64_t i = 0; i < groups * ratio; ++i) {
      kv_rows.push_back(kv.data() + i * d);
      gate_rows.push_back(gate.data() + i * d);
      kv_rows_there.push_back(kv_there + i * d);
      gate_rows_there.push_back(gate_there + i * d);
    }
    float* out = room<float>(groups * d);
    must(cuda::compress_group(stream_, {up(kv_rows_there), up(gate_rows_there), out, groups, ratio, d}));
    expect_conformance("compress_group", down(out, groups * d),
                       [&, groups = groups, ratio = ratio, d = d](ThreadPool& pool) {
                         std::vector<float> values(static_cast<size_t>(groups * d));
                         compress_group(pool, {kv_rows.data(), gate_rows.data(), values.data(), groups, ratio, d});
                         return values;
                       },
                       [ratio = ratio](size_t) { return 3.0 * static_cast<double>(ratio + 4) * 4.0 * kEps; });
  }
}

TEST_F(OpsCuda, index_scores_have_the_bits_of_the_cpu) {
  for (const Size& s : {Size{1, 1, 1, 1}, Size{5, 3, 7, 33}, Size{4, 8, 64, 100}, Size{2, 2, 16, 1100}, Size{17, 32, 128, 700}, Size{1, 32, 128, 5000}}) {
    for (bool round_bf16 : {false, true}) {
      const std::string what = "index scores, " + std::to_string(s.heads) + " heads of " + std::to_string(s.dim) + ", " +
                               std::to_string(s.most_keys) + " keys" + (round_bf16 ? ", bf16" : "");
      const std::vector<float> q = random_floats("q" + what, s.rows * s.heads * s.dim), w = random_floats("w" + what, s.rows * s.heads);
      const std::vector<float> k = random_floats("k" + what, s.most_keys * s.dim);
      std::vector<float> panels(static_cast<size_t>((s.most_keys + 31) / 32 * 32 * s.dim));
      for (int64_t j = 0; j < s.most_keys; ++j) set_index_key(panels.data(), s.dim, j, k.data() + j * s.dim);
      // On the device the keys come in two calls, as in a sequence.
      float* panels_there = up(std::vector<float>(panels.size(), 0.0f));
      const int64_t first = s.most_keys / 3;
      must(cuda::set_index_keys(stream_, up(k), first, s.dim, up(std::vector<int64_t>{1}), 2, panels_there));
      must(cuda::set_index_keys(stream_, up(k) + first * s.dim, s.most_keys - first, s.dim, up(std::vector<int64_t>{first}), 1, panels_there));
      EXPECT_EQ(bit_differences(down(panels_there, static_cast<int64_t>(panels.size())), panels), "") << what;
      std::vector<int64_t> visible, begin;
      int64_t total = 0;
      for (int64_t t = 0; t < s.rows; ++t) {
        visible.push_back(s.most_keys * (t + 1) / s.rows);
        begin.push_back(total);
        total += visible.back();
      }
      IndexScoresParams p;
      p.n_rows = s.rows;
      p.n_heads = s.heads;
      p.dim = s.dim;
      p.round_bf16 = round_bf16;
      IndexScoresParams there = p;
      there.queries = up(q);
      there.weights = up(w);
      there.key_panels = panels_there;
      there.n_visible = up(visible);
      there.out_begin = up(begin);
      there.out = room<float>(total);
      must(cuda::index_scores(stream_, there, s.most_keys));
      expect_conformance(what, down(there.out, total),
                         [&](ThreadPool& pool) {
                           std::vector<float> out(static_cast<size_t>(total));
                           p.queries = q.data();
                           p.weights = w.data();
                           p.key_panels = panels.data();
                           p.n_visible = visible.data();
                           p.out_begin = begin.data();
                           p.out = out.data();
                           index_scores(pool, p);
                           return out;
                         },
                         [&](size_t) {
                           const double size = static_cast<double>(s.heads * s.dim);
                           return size * static_cast<double>(s.dim + s.heads) * kEps + (round_bf16 ? 3.0 * size * 0x1p-8 : 0.0);
                         });
    }
  }
}

TEST_F(OpsCuda, the_router_chooses_and_weighs_as_the_cpu) {
  for (const auto& [rows, experts] : {std::pair<int64_t, int64_t>{0, 4}, {1, 1}, {7, 13}, {9, 384}, {17, 128}, {1, 384}}) {
    for (bool has_ties : {false, true}) {
      const int64_t active = std::min<int64_t>(6, experts);
      std::vector<float> logits = random_floats("logits", rows * experts, 30.0f), bias = random_floats("bias", experts, 0.5f);
      if (has_ties) {
        for (float& v : logits) v = std::round(v / 20.0f);
        bias.assign(bias.size(), 0.25f);
      }
      const auto params = [&, rows = rows, experts = experts](RouterParams p) {
        p.n_rows = rows;
        p.n_experts = experts;
        p.n_active = active;
        p.scale = 1.5f;
        return p;
      };
      RouterParams there = params({});
      there.logits = up(logits);
      there.bias = up(bias);
      there.scores = room<float>(rows * experts);
      there.ids = room<int32_t>(rows * active);
      there.weights = room<float>(rows * active);
      must(cuda::router(stream_, there));
      std::vector<float> got = down(there.scores, rows * experts);
      const std::vector<float> weights = down(there.weights, rows * active);
      const std::vector<int32_t> ids = down(there.ids, rows * active);
      got.insert(got.end(), weights.begin(), weights.end());
      got.insert(got.end(), ids.begin(), ids.end());
      expect_conformance("router " + std::to_string(experts) + (has_ties ? " with ties" : ""), got,
                         [&](ThreadPool& pool) {
                           std::vector<float> scores(logits.size()), w(weights.size());
                           std::vector<int32_t> chosen(ids.size());
                           RouterParams p = params({});
                           p.logits = logits.data();
                           p.bias = bias.data();
                           p.scores = scores.data();
                           p.ids = chosen.data();
                           p.weights = w.data();
                           router(pool, p);
                           std::vector<float> out = scores;
                           out.insert(out.end(), w.begin(), w.end());
                           out.insert(out.end(), chosen.begin(), chosen.end());
                           return out;
                         },
                         [](size_t) { return 6.0 * 8.0 * kEps; });
    }
  }
}

class OpsCudaSelect : public OpsCuda {
 protected:
  // Rows of n scores each, the second row of half as many.
  void check(const std::vector<float>& scores, int64_t n, int64_t k) {
    const int64_t rows = static_cast<int64_t>(scores.size()) / std::max<int64_t>(n, 1), block = 4, n_blocks = n / block + 3;
    std::vector<int64_t> begin, length;
    for (int64_t t = 0; t < rows; ++t) {
      begin.push_back(t * n);
      length.push_back(t == 1 ? n / 2 : n);
    }
    std::vector<uint8_t> allowed(static_cast<size_t>(rows * n_blocks));
    for (size_t b = 0; b < allowed.size(); ++b) allowed[b] = b % 3 != 1;
    const float* scores_there = up(scores);
    const int64_t *begin_there = up(begin), *length_there = up(length);
    for (bool is_masked : {false, true}) {
      cuda::SelectParams p;
      p.scores = scores_there;
      p.begin = begin_there;
      p.n = length_there;
      p.k = k;
      p.allowed = is_masked ? up(allowed) : nullptr;
      p.allowed_stride = n_blocks;
      p.block_size = block;
      p.entries_stride = std::max<int64_t>(1, std::min(k, n));
      p.entries = room<int32_t>(rows * p.entries_stride);
      p.n_selected = room<int64_t>(rows);
      p.n_rows = rows;
      must(cuda::select_top_k(stream_, p));
      const std::vector<int32_t> entries = down(p.entries, rows * p.entries_stride);
      const std::vector<int64_t> n_selected = down(p.n_selected, rows);
      for (int64_t t = 0; t < rows; ++t) {
        std::vector<int32_t> expected;
        reference::select_top_k(scores.data() + t * n, length[static_cast<size_t>(t)], k, is_masked ? allowed.data() + t * n_blocks : nullptr, block, expected);
        ASSERT_EQ(n_selected[static_cast<size_t>(t)], static_cast<int64_t>(expected.size())) << n << " " << k << " row " << t << (is_masked ? " masked" : "");
        const auto from = entries.begin() + t * p.entries_stride;
        EXPECT_TRUE(std::equal(expected.begin(), expected.end(), from)) << n << " " << k << " row " << t << (is_masked ? " masked" : "");
      }
    }
    cuda::SelectBlocksParams b;
    b.scores = scores_there;
    b.begin = begin_there;
    b.n = length_there;
    b.k = k;
    b.block_size = block;
    b.n_blocks = n_blocks;
    b.mask = room<uint8_t>(rows * n_blocks);
    b.best = room<float>(rows * n_blocks);
    b.chosen = room<int32_t>(rows * n_blocks);
    b.lengths = room<int64_t>(3 * rows);
    b.n_rows = rows;
    must(cuda::select_blocks(stream_, b));
    const std::vector<uint8_t> mask = down(b.mask, rows * n_blocks);
    for (int64_t t = 0; t < rows; ++t) {
      std::vector<uint8_t> expected(static_cast<size_t>(n_blocks), 9);
      reference::select_blocks(scores.data() + t * n, length[static_cast<size_t>(t)], k, block, expected.data(), n_blocks);
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), mask.begin() + t * n_blocks)) << "blocks of " << n << ", " << k << ", row " << t;
    }
  }
};

TEST_F(OpsCudaSelect, takes_the_best_with_ties_to_the_lower_index) {
  for (int64_t n : {1, 7, 64, 301, 1025, 5000}) {
    std::vector<float> scores = random_floats("scores", 3 * n);
    for (size_t i = 0; i < scores.size(); i += 3) scores[i] = i % 2 == 0 ? 0.0f : -0.0f;  // many exact ties
    for (int64_t k : {1, 5, 24, 512}) check(scores, n, k);
  }
}

TEST_F(OpsCudaSelect, equal_nan_and_infinite_scores_are_ordered_as_on_the_cpu) {
  for (float value : {0.0f, -3.5f, INFINITY, -INFINITY, NAN}) check(std::vector<float>(3 * 300, value), 300, 40);
  std::vector<float> mixed = random_floats("mixed", 3 * 300);
  for (size_t i = 0; i < mixed.size(); i += 5) mixed[i] = NAN;
  for (size_t i = 1; i < mixed.size(); i += 7) mixed[i] = i % 2 == 0 ? INFINITY : -INFINITY;
  for (int64_t k : {10, 100, 250, 299}) check(mixed, 300, k);
}

}  // namespace
}  // namespace espalier::ops
