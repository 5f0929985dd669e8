#include "model/pack_plan.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "format/json.h"

namespace espalier {
namespace {

using ::testing::HasSubstr;

// Two layers of four experts, one drafter stage of two.
Config small_config() {
  Config c;
  c.n_layers = 2;
  c.n_experts = 4;
  c.d_model = c.d_ff = c.q_lora_rank = c.head_dim = 128;
  c.o_lora_rank = 128;
  c.n_heads = c.o_groups = 2;
  c.vocab = 256;
  c.compress_ratios = {0, 0, 0};
  c.n_streams = 4;
  c.drafter.n_stages = 1;
  c.drafter.n_experts = 2;
  c.drafter.target_layers = {1};
  return c;
}

PackPlan parsed(const std::string& text) {
  const auto plan = parse_pack_plan(text, "plan", small_config());
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  return plan.ok() ? *plan : PackPlan();
}

std::string error_of(const std::string& text) {
  const auto plan = parse_pack_plan(text, "plan.json", small_config());
  return plan.ok() ? "accepted" : plan.error().message();
}

TEST(PackPlan, every_character_stands_for_a_width_and_back) {
  const std::string all = "12345678abcn";
  const std::vector<int> k2 = {2, 4, 6, 8, 10, 12, 14, 16, 3, 5, 7, kNativeWidth};
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(width_from_char(all[i]), k2[i]);
    EXPECT_EQ(width_char(k2[i]), all[i]);
  }
  EXPECT_FALSE(width_from_char('0').has_value());
  EXPECT_FALSE(width_from_char('9').has_value());
  EXPECT_EQ(width_char(9), '?');
}

TEST(PackPlan, all_known_nestings_say_the_same) {
  const std::vector<ExpertWidths> first = {{4, 4, 4}, {6, 6, 6}, {8, 8, 8}, {10, 10, 10}};
  for (const char* text : {R"({"layers":{"0":"2345","1":"3333"},"drafter":{"mtp.0":"34"}})",
                           R"({"layers":["2345","3333"],"drafter":["34"],"unknown":[1]})",
                           R"({"0":"2345","1":"3333","drafter":{"0":"34"}})",
                           R"({"layers":{"L00":"2345","layers.1":[3,3,3,3]},"drafter":["34"]})"}) {
    const PackPlan plan = parsed(text);
    ASSERT_EQ(plan.experts.count(0), 1u) << text;
    EXPECT_EQ(plan.experts.at(0), first) << text;
    EXPECT_EQ(plan.experts.at(2), (std::vector<ExpertWidths>{{6, 6, 6}, {8, 8, 8}})) << text;
  }
  EXPECT_EQ(parsed(R"(["2345","3333"])").experts.at(0), first);
}

TEST(PackPlan, matrices_give_w1_w2_and_w3_their_own_widths) {
  const PackPlan plan = parsed(R"({"granularity":"matrix","layers":{"0":"3333","1":"2222"},
                                   "matrices":{"1":{"w1":"22an","w2":"34bn","w3":"55cn"}}})");
  EXPECT_EQ(plan.experts.at(1), (std::vector<ExpertWidths>{{4, 10, 6}, {4, 10, 8}, {3, 7, 5}, {0, 0, 0}}));
  EXPECT_EQ(plan.experts.at(0)[3], (ExpertWidths{6, 6, 6}));
}

TEST(PackPlan, the_most_specific_name_decides_for_dense_matrices) {
  const PackPlan plan =
      parsed(R"({"layers":{},"dense":{"attn.wq_a":4,"layers.1.attn.wq_a":2.5,"shared":5,"drafter_dense":6,"head":"native"}})");
  const Config c = small_config();
  std::map<std::string, std::optional<int>> widths;
  for (const MatrixSpec& spec : all_matrices(c)) widths[spec.stem] = plan.width_of(spec, c.n_layers);
  EXPECT_EQ(widths["layers.0.attn.wq_a"], 8);
  EXPECT_EQ(widths["layers.1.attn.wq_a"], 5);
  EXPECT_EQ(widths["layers.0.ffn.shared_experts.w2"], 10);
  EXPECT_EQ(widths["mtp.0.attn.wq_a"], 12);
  EXPECT_EQ(widths["head"], kNativeWidth);
  EXPECT_EQ(widths["layers.0.attn.wkv"], std::nullopt);
  EXPECT_EQ(widths["layers.0.ffn.experts.0.w1"], std::nullopt);
}

TEST(PackPlan, what_is_written_is_read_back) {
  PackPlan plan;
  plan.experts[0] = {{4, 4, 4}, {6, 6, 6}, {3, 3, 3}, {0, 0, 0}};
  plan.experts[1] = {{4, 4, 6}, {6, 6, 6}, {8, 8, 8}, {16, 16, 2}};
  plan.experts[2] = {{8, 8, 10}, {8, 8, 8}};
  plan.dense = {{"head", 12}, {"layers.0.attn.wkv", 5}, {"shared", kNativeWidth}};
  plan.read_bpw = 2.9;
  const PackPlan back = parsed(pack_plan_json(plan, small_config()));
  EXPECT_EQ(back.experts, plan.experts);
  EXPECT_EQ(back.dense, plan.dense);
  EXPECT_EQ(back.read_bpw, plan.read_bpw);
}

TEST(PackPlan, mistakes_are_named_with_layer_and_expert) {
  EXPECT_THAT(error_of("[]"), HasSubstr("plan.json: 'layers': expected 2 entries, found 0"));
  EXPECT_THAT(error_of("{}"), HasSubstr("expected the key 'layers' or 'matrices'"));
  EXPECT_THAT(error_of("3"), HasSubstr("expected an object or a list"));
  EXPECT_THAT(error_of(R"({"layers":{"0":"333"}})"), HasSubstr("'layers.0': expected 4 widths of 12345678abcn, found 3 characters"));
  EXPECT_THAT(error_of(R"({"layers":{"0":"3339"}})"), HasSubstr("found '9' for expert 3"));
  EXPECT_THAT(error_of(R"({"layers":{"0":[3,3,3.2,3]}})"), HasSubstr("found 3.2 for expert 2"));
  EXPECT_THAT(error_of(R"({"layers":{"2":"3333"}})"), HasSubstr("'layers.2': expected a number below 2"));
  EXPECT_THAT(error_of(R"({"layers":{"x":"3333"}})"), HasSubstr("'layers.x'"));
  EXPECT_THAT(error_of(R"({"layers":{"0":"3333"},"drafter":["333"]})"), HasSubstr("'drafter.0': expected 2 widths"));
  EXPECT_THAT(error_of(R"({"layers":{"0":"3333"},"matrices":{"0":{"w1":"3333","w2":"3333","w3":"3333"}}})"),
              HasSubstr("expected each layer once"));
  EXPECT_THAT(error_of(R"({"matrices":{"0":{"w1":"333n","w2":"3333","w3":"3333"}}})"),
              HasSubstr("native or none, found 1 of expert 3"));
  EXPECT_THAT(error_of(R"({"layers":{},"dense":{"head":9}})"), HasSubstr("'dense.head'"));
}

}  // namespace
}  // namespace espalier
