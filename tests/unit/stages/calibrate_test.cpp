// Calibration: pruning and counting by hand-made numbers, and layer inputs that are those of a plain forward pass.
#include <gmock/gmock.h>

#include <cstring>
#include <limits>

#include "format/safetensors.h"
#include "model/expert_pruning.h"
#include "stages/calibrate/routing_counter.h"
#include "stages/calibrate_model.h"
#include "unit/stages/test_files.h"
#include "unit/stages/tiny_model.h"

namespace espalier {
namespace {

using testing::ElementsAre;

std::vector<uint8_t> kept(const ExpertPruning& pruning, const std::vector<float>& weights) {
  std::vector<uint8_t> out(weights.size());
  const int64_t n = keep_experts(pruning, weights.data(), static_cast<int64_t>(weights.size()), out.data());
  EXPECT_EQ(n, std::count(out.begin(), out.end(), 1));
  return out;
}

TEST(ExpertPruning, published_golden_values_and_the_order_of_ties) {
  EXPECT_THAT(kept({0.85, 3}, {.40f, .22f, .15f, .10f, .08f, .05f}), ElementsAre(1, 1, 1, 1, 0, 0));
  EXPECT_THAT(kept({0.85, 3}, {.60f, .30f, .04f, .03f, .02f, .01f}), ElementsAre(1, 1, 1, 0, 0, 0));
  EXPECT_THAT(kept({0.5, 1}, {.1f, .2f, .2f, .1f}), ElementsAre(0, 1, 1, 0));  // any order, any sum
  EXPECT_THAT(kept({0.3, 1}, {.2f, .2f, .2f}), ElementsAre(1, 0, 0));
  EXPECT_THAT(kept({0.5, 9}, {.1f, .9f}), ElementsAre(1, 1));
  EXPECT_THAT(kept({0.5, 1}, {0.f, 0.f}), ElementsAre(1, 1));
}

TEST(RoutingCounter, counts_energies_and_leaves_tokens_out_that_are_not_finite) {
  ThreadPool pool(2);
  RoutingCounter counter(2, 3, 2, ExpertPruning{0.7, 1}, pool);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  // Three tokens, the last with a broken output; width 2, two experts each.
  const std::vector<float> x = {1, 1, 1, 1, 1, 1};
  const std::vector<int32_t> ids = {0, 2, 1, 2, 0, 1};
  const std::vector<float> weights = {1.0f, 0.5f, 1.2f, 0.3f, 0.75f, 0.75f};
  const std::vector<float> outputs = {3, 4, -3, 0, 1, 0, 1, 0, nan, 0, 0, 0};
  counter.begin_row(1, 1);
  counter.moe_input("layers.1.", x.data(), 3, 2, ids.data(), weights.data(), 2);
  counter.expert_outputs("layers.1.", outputs.data(), 3, 2, 2);
  EXPECT_TRUE(counter.has_dropped());
  EXPECT_EQ(counter.dropped(), 1);
  const RoutingCounts& c = counter.counts();
  EXPECT_THAT(c.positions, ElementsAre(0, 0, 0, 2));
  EXPECT_THAT(c.tokens, ElementsAre(0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 2));
  EXPECT_THAT(c.energy, ElementsAre(0, 0, 0, 0, 0, 0, 0, 25, 0, 1, 0, 10));
  EXPECT_THAT(c.output_energy, ElementsAre(0, 0, 0, 16 + 4));  // (0, 4) and (2, 0)
  EXPECT_EQ(counter.shares()[11], 0.5f);
  EXPECT_THAT(counter.reads_routed(), ElementsAre(0, 0, 0, 0.5f, 0.5f, 1));
  EXPECT_THAT(counter.reads_served(), ElementsAre(0, 0, 0, 0.5f, 0.5f, 0.5f));  // 0.5 of 1.5 is needed for 0.7, 0.3 not
  counter.begin_row(0, 0);
  EXPECT_FALSE(counter.has_dropped());
}

// What a plain forward pass shows to an observer at one layer.
class PlainInputs : public LayerObserver {
 public:
  explicit PlainInputs(std::string prefix) : prefix_(std::move(prefix)) {}
  void linear_input(std::string_view stem, const float* x, int64_t n_rows, int64_t in) override {
    if (stem == prefix_ + "attn.wq_a") attention.insert(attention.end(), x, x + n_rows * in);
  }
  void moe_input(std::string_view block, const float* x, int64_t n_rows, int64_t d, const int32_t* expert_ids,
                 const float*, int64_t n_active) override {
    if (block != prefix_) return;
    moe.insert(moe.end(), x, x + n_rows * d);
    ids.insert(ids.end(), expert_ids, expert_ids + n_rows * n_active);
  }
  std::vector<float> attention, moe;
  std::vector<int32_t> ids;

 private:
  std::string prefix_;
};

bool holds(const SafetensorsFile& file, const std::string& name, const void* data, size_t size) {
  const TensorEntry* entry = file.find(name);
  return entry != nullptr && entry->size_bytes() == size && std::memcmp(file.view(*entry).data, data, size) == 0;
}

TEST(Calibrate, layer_inputs_equal_those_of_a_plain_forward_bit_for_bit) {
  ThreadPool pool(2);
  const test::TempFolder dir;
  const std::vector<DatasetRow> rows = test::random_token_rows({150, 17, 1, 64}, "inputs");
  ASSERT_TRUE(write_dataset(dir / "data.jsonl", rows).ok());
  const std::shared_ptr<const Model> model = Model::load(test::tiny_dir(), {}, pool).value();
  SilentProgress progress;
  for (int layer : {0, 3, 7}) {  // 3 and 7 read pools and selections of earlier layers
    PlainInputs plain("layers." + std::to_string(layer) + ".");
    for (const DatasetRow& row : rows) {
      SequenceState state(model->config());
      ForwardOptions options;
      options.chunk = 64;  // two chunks for the longest row
      options.observer = &plain;
      ASSERT_TRUE(forward(*model, state, row.ids, options, pool).ok());
    }
    CalibrateOptions options;
    options.checkpoint = test::tiny_dir();
    options.data = dir / "data.jsonl";
    options.out = dir / ("stats" + std::to_string(layer));
    options.export_layer = layer;
    options.export_file = dir / "x.safetensors";
    const auto report = calibrate(options, progress, pool);
    ASSERT_TRUE(report.ok()) << report.status().message();
    const SafetensorsFile file = SafetensorsFile::open(options.export_file).value();
    EXPECT_TRUE(holds(file, "x", plain.moe.data(), plain.moe.size() * sizeof(float))) << layer;
    EXPECT_TRUE(holds(file, "ids", plain.ids.data(), plain.ids.size() * sizeof(int32_t))) << layer;
    EXPECT_TRUE(holds(file, "input.layers." + std::to_string(layer) + ".attn.wq_a", plain.attention.data(),
                      plain.attention.size() * sizeof(float)))
        << layer;
  }
}

}  // namespace
}  // namespace espalier
