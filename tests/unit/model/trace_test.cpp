// Inner choices and values of the forward pass against the vendor's recordings in fp32: router, index entries,
// candidate blocks, Engram rows, streams, mHC coefficients, caches, decode choices.
#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "model/moe.h"
#include "ops/index_scores.h"
#include "unit/model/golden_fixture.h"

namespace espalier {
namespace {

// Keeps what the forward pass shows, row after row, by layer.
class Recorder : public LayerObserver {
 public:
  void moe_input(std::string_view prefix, const float*, int64_t n, int64_t, const int32_t* ids, const float* weights,
                 int64_t n_active) override {
    auto& r = routing[std::string(prefix)];
    r.ids.insert(r.ids.end(), ids, ids + n * n_active);
    r.weights.insert(r.weights.end(), weights, weights + n * n_active);
  }
  void value(int block, std::string_view what, const float* x, int64_t n, int64_t cols) override {
    auto& v = values[{block, std::string(what)}];
    v.insert(v.end(), x, x + n * cols);
  }
  void index_scores(int block, const float* s, const int64_t* begin, const int64_t* n_visible, int64_t n) override {
    for (int64_t t = 0; t < n; ++t) scores[block].emplace_back(s + begin[t], s + begin[t] + n_visible[t]);
  }
  void engram_table_rows(int block, const int64_t* rows, int64_t n, int64_t columns) override {
    auto& e = engram[block];
    e.insert(e.end(), rows, rows + n * columns);
  }

  std::map<std::string, Routing> routing;
  std::map<std::pair<int, std::string>, std::vector<float>> values;
  std::map<int, std::vector<std::vector<float>>> scores;
  std::map<int, std::vector<int64_t>> engram;
};

// One prompt layer by layer, so that the selected entries of every layer can be looked at.
struct Trace {
  Recorder recorder;
  std::map<int, SelectedEntries> selected;
  std::vector<uint8_t> candidates;
  int64_t n_candidate_blocks = 0;
  SequenceState state{tiny_model()->config()};
  Tensor embed;
  Tensor taps;

  void run(std::span<const int32_t> ids) {
    const Model& m = *tiny_model();
    const CallContext context{m.config(), m.engram_hashes, m.engram_token_map, Numerics::kFull, test_pool(), &recorder};
    StreamState stream;
    const Status begun = begin_call(context, m.globals, state, ids, &stream);
    ASSERT_TRUE(begun.ok()) << begun.message();
    embed = stream.h;
    for (int l = 0; l < m.config().n_layers; ++l) {
      const Status s = run_layer(context, m.layers[static_cast<size_t>(l)], l, state, stream);
      ASSERT_TRUE(s.ok()) << s.message();
      if (m.config().is_index_source(l)) selected[l] = stream.selected;
    }
    candidates = stream.candidates;
    n_candidate_blocks = stream.n_candidate_blocks;
    taps = stream.taps;
    finish_call(context, m.globals, state, stream, true);
  }
};

std::string layer_name(const std::string& p, const std::string& part, int layer, const std::string& what) {
  return p + "." + part + ".L" + std::to_string(layer) + what;
}

void expect_routing(const Recorder& r, const std::string& stem, int layer) {
  const std::vector<int64_t> ids = fp32().integers(stem + ".router.L" + std::to_string(layer) + ".ids");
  const std::vector<float> weights = fp32().floats(stem + ".router.L" + std::to_string(layer) + ".weights");
  const Routing& mine = r.routing.at("layers." + std::to_string(layer) + ".");
  ASSERT_EQ(mine.ids.size(), ids.size()) << stem << " layer " << layer;
  const size_t k = 2;
  for (size_t t = 0; t < ids.size() / k; ++t) {
    std::map<int64_t, float> expected;  // the reference lists experts by score, we by id
    for (size_t i = 0; i < k; ++i) expected[ids[t * k + i]] = weights[t * k + i];
    for (size_t i = 0; i < k; ++i) {
      const auto found = expected.find(mine.ids[t * k + i]);
      ASSERT_NE(found, expected.end()) << stem << " layer " << layer << " row " << t << ": expert "
                                       << mine.ids[t * k + i];
      EXPECT_NEAR(mine.weights[t * k + i], found->second, 1e-5f) << stem << " layer " << layer << " row " << t;
    }
  }
}

// Row t's selected entries equal the recorded ones; entries may differ only where their scores are exactly equal.
void expect_selected(const Trace& trace, const std::string& name, int layer) {
  const std::vector<int64_t> ids = fp32().integers(name);
  const SelectedEntries& mine = trace.selected.at(layer);
  const size_t n_rows = mine.begin.size() - 1;
  const size_t k = ids.size() / n_rows;
  for (size_t t = 0; t < n_rows; ++t) {
    std::set<int64_t> expected;
    for (size_t i = 0; i < k; ++i) {
      if (ids[t * k + i] >= 0) expected.insert(ids[t * k + i]);
    }
    std::set<int64_t> found(mine.entries.begin() + mine.begin[t], mine.entries.begin() + mine.begin[t + 1]);
    ASSERT_EQ(found.size(), expected.size()) << name << " row " << t;
    if (found == expected) continue;
    const auto scores_of = [&](const std::set<int64_t>& a, const std::set<int64_t>& b) {
      std::multiset<float> out;
      for (int64_t j : a) {
        if (b.count(j) == 0) out.insert(trace.recorder.scores.at(layer)[t][static_cast<size_t>(j)]);
      }
      return out;
    };
    EXPECT_EQ(scores_of(found, expected), scores_of(expected, found)) << name << " row " << t;
  }
}

TEST(GoldenChoices, router_index_engram_and_candidates_equal_the_vendors) {
  const Config& c = tiny_model()->config();
  for (const std::string& p : prompt_names()) {
    Trace trace;
    trace.run(prompt(p));
    for (int l = 0; l < c.n_layers; ++l) {
      expect_routing(trace.recorder, p + ".prefill", l);
      const std::string index_name = layer_name(p, "prefill.indexer", l, ".ids");
      if (c.is_index_source(l) && fp32().has(index_name)) expect_selected(trace, index_name, l);
      if (c.engram_slot(l) >= 0) {
        EXPECT_EQ(trace.recorder.engram.at(l), fp32().integers(layer_name(p, "prefill.engram", l, ".rows")))
            << p << " layer " << l;
      }
    }
    const std::vector<int64_t> mask = fp32().integers(layer_name(p, "prefill.candidates", c.candidate_source, ""));
    const int64_t n = static_cast<int64_t>(prompt(p).size());
    ASSERT_EQ(static_cast<int64_t>(mask.size()), n * n);
    for (int64_t t = 0; t < n; ++t) {
      for (int64_t j = 0; j <= t; ++j) {  // entries that the row can see; ratio 1
        const uint8_t mine =
            trace.candidates[static_cast<size_t>(t * trace.n_candidate_blocks + j / c.candidate_block_size)];
        ASSERT_EQ(mine, mask[static_cast<size_t>(t * n + j)]) << p << " row " << t << " entry " << j;
      }
    }
  }
}

TEST(GoldenChoices, decoding_makes_the_vendors_choices) {
  const Config& c = tiny_model()->config();
  for (const std::string p : {"p40", "p150"}) {
    Trace trace;
    trace.run(prompt(p));
    const std::vector<int32_t> fed = fp32().ids(p + ".decode.owner.tokens");
    std::map<int, SelectedEntries> all;
    trace.recorder = Recorder();
    for (size_t i = 0; i < fed.size(); ++i) {
      trace.run({&fed[i], 1});
      for (auto& [layer, s] : trace.selected) {
        SelectedEntries& a = all[layer];
        if (a.begin.empty()) a.begin.push_back(0);
        a.entries.insert(a.entries.end(), s.entries.begin(), s.entries.end());
        a.begin.push_back(static_cast<int64_t>(a.entries.size()));
      }
    }
    trace.selected = all;
    for (int l = 0; l < c.n_layers; ++l) {
      expect_routing(trace.recorder, p + ".decode.owner", l);
      if (c.is_index_source(l)) expect_selected(trace, layer_name(p, "decode.owner.indexer", l, ".ids"), l);
      if (c.engram_slot(l) >= 0) {
        EXPECT_EQ(trace.recorder.engram.at(l), fp32().integers(layer_name(p, "decode.owner.engram", l, ".rows")));
      }
    }
  }
}

TEST(GoldenValues, streams_coefficients_and_sub_layers_of_p40_agree_in_every_layer) {
  const Config& c = tiny_model()->config();
  Trace trace;
  trace.run(prompt("p40"));
  const auto expect_value = [&](int block, const std::string& what, const std::string& name, float tolerance) {
    const std::vector<float> expected = fp32().floats("p40.prefill." + name);
    const std::vector<float>& mine = trace.recorder.values.at({block, what});
    ASSERT_EQ(mine.size(), expected.size()) << name;
    const Difference d = difference(mine.data(), expected);
    EXPECT_LE(d.worst, tolerance) << name << ": " << d;
  };
  for (int l = 0; l < c.n_layers; ++l) {
    const std::string L = "L" + std::to_string(l);
    expect_value(l, "stream.out", "stream." + L + ".out", 1e-4f);
    if (c.engram_slot(l) >= 0) expect_value(l, "engram.out", "stream." + L + ".engram_out", 1e-4f);
    if (fp32().has("p40.prefill.pre." + L)) expect_value(l, "pre", "pre." + L, 1e-5f);
    for (const std::string site : {"attn", "ffn"}) {
      expect_value(l, site + ".in", site + "." + L + ".in", 1e-4f);
      expect_value(l, site + ".out", site + "." + L + ".out", 1e-4f);
      for (const std::string k : {"pre", "post", "comb"})
        expect_value(l, "hc." + site + "_" + k, "hc." + L + "." + site + "_" + k, 1e-5f);
    }
    expect_value(l, "router.scores", "router." + L + ".scores", 1e-4f);
  }
  expect_value(-1, "hidden", "hidden", 1e-4f);
  const Difference taps = difference(trace.taps.f32(), fp32().floats("p40.prefill.taps"));
  EXPECT_LE(taps.worst, 1e-4f) << taps;
}

TEST(GoldenValues, caches_hold_the_recorded_rows) {
  const Config& c = tiny_model()->config();
  for (const std::string p : {"p17", "p40"}) {
    Trace trace;
    trace.run(prompt(p));
    const int64_t n = trace.state.n_tokens();
    for (int l = 0; l < c.n_layers; ++l) {
      const std::string stem = p + ".prefill.cache.L" + std::to_string(l) + ".";
      const std::vector<float> window = fp32().floats(stem + "window");
      for (int64_t pos = std::max<int64_t>(0, n - c.window); pos < n; ++pos) {
        const std::vector<float> row(window.begin() + pos % c.window * c.head_dim,
                                     window.begin() + (pos % c.window + 1) * c.head_dim);
        const Difference d = difference(trace.state.windows[static_cast<size_t>(l)].row(pos), row);
        EXPECT_LE(d.worst, 1e-4f) << stem << "window position " << pos << ": " << d;
      }
      if (!c.is_kv_source(l)) continue;
      const CompressedCache& cache = trace.state.compressed[static_cast<size_t>(l)];
      const Difference kv = difference(cache.kv.data(), fp32().floats(stem + "compressed"));
      EXPECT_LE(kv.worst, 1e-4f) << stem << "compressed: " << kv;
      const std::vector<float> keys = fp32().floats(stem + "index_k");
      std::vector<float> mine(keys.size());
      for (int64_t j = 0; j < n / c.ratio(l); ++j)
        ops::get_index_key(cache.index_keys.data(), c.index_head_dim, j, mine.data() + j * c.index_head_dim);
      const Difference index = difference(mine.data(), keys);
      EXPECT_LE(index.worst, 1e-4f) << stem << "index_k: " << index;
      if (c.ratio(l) == 1) continue;
      const std::vector<float> group = fp32().floats(stem + "group_kv");
      for (int64_t pos = n / c.ratio(l) * c.ratio(l); pos < n; ++pos) {
        const int64_t slot = pos % c.ratio(l);
        const std::vector<float> row(group.begin() + slot * c.head_dim, group.begin() + (slot + 1) * c.head_dim);
        const Difference d = difference(cache.group_kv.data() + pos % cache.n_group_slots * c.head_dim, row);
        EXPECT_LE(d.worst, 1e-4f) << stem << "group_kv: " << d;
      }
    }
  }
}

}  // namespace
}  // namespace espalier
