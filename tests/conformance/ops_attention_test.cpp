#include <cmath>

#include "conformance/ops_cases.h"
#include "ops/attention.h"
#include "ops/compress_group.h"
#include "ops/index_scores.h"

namespace espalier::ops {
namespace {

struct Size {
  int64_t rows, heads, dim, most_keys;
};

// Row t has t mod (most_keys + 1) keys, so empty lists occur; every fifth place is empty in the online form.
void check_attention(const Size& s, bool is_online) {
  const std::string what = std::string(is_online ? "online " : "") + "attention " + std::to_string(s.rows) + " rows, " +
                           std::to_string(s.heads) + " heads of " + std::to_string(s.dim) + ", up to " +
                           std::to_string(s.most_keys) + " keys";
  const std::vector<float> q = random_floats("q" + what, s.rows * s.heads * s.dim, 3.0f);
  const std::vector<float> kv = random_floats("kv" + what, (s.most_keys + 1) * s.dim, 2.0f);
  const std::vector<float> sink = random_floats("sink" + what, s.heads, 2.0f);
  std::vector<const float*> keys;
  std::vector<int64_t> begin = {0};
  for (int64_t t = 0; t < s.rows; ++t) {
    for (int64_t j = 0; j < (t * 37 + 3) % (s.most_keys + 1); ++j) {
      keys.push_back(is_online && j % 5 == 4 ? nullptr : kv.data() + (j * 7 + t) % (s.most_keys + 1) * s.dim);
    }
    begin.push_back(static_cast<int64_t>(keys.size()));
  }
  expect_conformance(
      what,
      [&](ThreadPool& pool) {
        std::vector<float> out(q.size(), 99.0f);
        AttentionParams p;
        p.q = q.data();
        p.keys = keys.data();
        p.key_begin = begin.data();
        p.sink = sink.data();
        p.out = out.data();
        p.n_rows = s.rows;
        p.n_heads = s.heads;
        p.head_dim = s.dim;
        p.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(s.dim)));
        p.is_online = is_online;
        attention(pool, p);
        return out;
      },
      // Scores have an error of dim * eps * |q||k| * scale, which moves a probability by as much; values are at most 2.
      // In the online form a probability near a bf16 boundary may round the other way: 2^-8 of one value.
      [&](size_t) {
        const double score = static_cast<double>(s.dim) * kEps * 6.0 * std::sqrt(static_cast<double>(s.dim));
        return 2.0 * (2.0 * score + static_cast<double>(s.most_keys + 8) * kEps) + (is_online ? 2.0 * 0x1p-8 : 0.0);
      });
}

TEST(OpsAttention, all_tiers_give_equal_bits_and_agree_with_the_reference) {
  for (const Size& s : {Size{0, 2, 16, 4}, Size{1, 1, 1, 1}, Size{3, 5, 7, 3}, Size{7, 4, 128, 40}, Size{5, 6, 33, 130},
                        Size{2, 64, 64, 70}}) {
    check_attention(s, false);
    check_attention(s, true);
  }
}

TEST(OpsAttention, an_empty_list_gives_zeros_and_the_sink_only_shrinks_the_output) {
  ThreadPool pool(1);
  const float q[2] = {1, 0}, key[2] = {4, 8};
  const float* keys[1] = {key};
  const int64_t begin[3] = {0, 0, 1};
  const float queries[4] = {q[0], q[1], q[0], q[1]};
  const float sink[1] = {2.0f};
  float out[4] = {9, 9, 9, 9};
  AttentionParams p;
  p.q = queries;
  p.keys = keys;
  p.key_begin = begin;
  p.sink = sink;
  p.out = out;
  p.n_rows = 2;
  p.n_heads = 1;
  p.head_dim = 2;
  p.scale = 0.5f;  // score 2 equals the sink: the key gets half of the weight
  attention(pool, p);
  EXPECT_EQ(out[0], 0);
  EXPECT_EQ(out[1], 0);
  EXPECT_FLOAT_EQ(out[2], 2);
  EXPECT_FLOAT_EQ(out[3], 4);
}

TEST(OpsIndexScores, all_tiers_give_equal_bits_and_agree_with_the_reference) {
  for (const Size& s : {Size{1, 1, 1, 1}, Size{5, 3, 7, 33}, Size{4, 8, 64, 100}, Size{2, 2, 16, 1100}}) {
    for (bool round_bf16 : {false, true}) {
      const std::string what = "index scores, " + std::to_string(s.heads) + " heads of " + std::to_string(s.dim) +
                               ", " + std::to_string(s.most_keys) + " keys" + (round_bf16 ? ", bf16" : "");
      const std::vector<float> q = random_floats("q" + what, s.rows * s.heads * s.dim);
      const std::vector<float> w = random_floats("w" + what, s.rows * s.heads);
      const std::vector<float> k = random_floats("k" + what, s.most_keys * s.dim);
      std::vector<float> panels(static_cast<size_t>((s.most_keys + 31) / 32 * 32 * s.dim));
      for (int64_t j = 0; j < s.most_keys; ++j) set_index_key(panels.data(), s.dim, j, k.data() + j * s.dim);
      std::vector<int64_t> visible, begin;
      int64_t total = 0;
      for (int64_t t = 0; t < s.rows; ++t) {
        visible.push_back(s.most_keys * (t + 1) / s.rows);
        begin.push_back(total);
        total += visible.back();
      }
      expect_conformance(
          what,
          [&](ThreadPool& pool) {
            std::vector<float> out(static_cast<size_t>(total));
            IndexScoresParams p;
            p.queries = q.data();
            p.weights = w.data();
            p.key_panels = panels.data();
            p.n_visible = visible.data();
            p.out_begin = begin.data();
            p.out = out.data();
            p.n_rows = s.rows;
            p.n_heads = s.heads;
            p.dim = s.dim;
            p.round_bf16 = round_bf16;
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

TEST(OpsIndexScores, keys_come_back_from_their_panels) {
  std::vector<float> panels(2 * 32 * 5);
  for (int64_t j = 0; j < 40; ++j)
    set_index_key(panels.data(), 5, j, random_floats("key" + std::to_string(j), 5).data());
  for (int64_t j = 0; j < 40; ++j) {
    std::vector<float> key(5);
    get_index_key(panels.data(), 5, j, key.data());
    EXPECT_EQ(key, random_floats("key" + std::to_string(j), 5));
  }
}

TEST(OpsCompressGroup, all_tiers_give_equal_bits_and_agree_with_the_reference) {
  for (const auto& [groups, ratio, d] :
       {std::tuple<int64_t, int64_t, int64_t>{0, 2, 8}, {1, 1, 1}, {3, 2, 13}, {5, 4, 128}}) {
    const std::vector<float> kv = random_floats("kv", groups * ratio * d, 3.0f);
    const std::vector<float> gate = random_floats("gate", groups * ratio * d, 10.0f);
    std::vector<const float*> kv_rows, gate_rows;
    for (int64_t i = 0; i < groups * ratio; ++i) {
      kv_rows.push_back(kv.data() + i * d);
      gate_rows.push_back(gate.data() + i * d);
    }
    expect_conformance(
        "compress_group",
        [&](ThreadPool& pool) {
          std::vector<float> out(static_cast<size_t>(groups * d));
          compress_group(pool, {kv_rows.data(), gate_rows.data(), out.data(), groups, ratio, d});
          return out;
        },
        [&](size_t) { return 3.0 * static_cast<double>(ratio + 4) * 4.0 * kEps; });
  }
}

}  // namespace
}  // namespace espalier::ops
