#include "model/sensitivity.h"

#include <gmock/gmock.h>

#include <cmath>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>

#include "format/json.h"
#include "format/safetensors.h"
#include "model/block_slopes.h"
#include "model/routing_statistics.h"

namespace espalier {
namespace {

using ::testing::HasSubstr;

Config small_config() {
  Config c;
  c.n_layers = 2;
  c.n_experts = 3;
  c.n_active = 2;
  return c;
}

Sensitivity small_table() {
  Sensitivity t;
  t.method = "swap";
  t.model_identity = "abc";
  t.domains = {{"prose", 1, 4096, 16, 1e-5, 0.9}, {"code", 0.5, 2048, 8, 2e-5, 1.1}};
  t.layers.resize(2);
  t.layers[0] = {{1e-6, 2e-6}, {0.5, 0.25}, {0.01, 0.02}, {}, {{"k2", {{0.04, 0.03}, {1e-3, 2e-3}}}}, std::nullopt};
  t.layers[1] = {{0, 0}, {0.125, 0}, {0, 0}, {0.2, 0.1}, {}, MatrixFactors{1, 1, 1.5}};
  t.factors = {1, 1, 1.37};
  t.base = SensitivityBase{std::string(64, 'a'), {0.02, 0.03}};
  t.routing_sha256 = std::string(64, 'b');
  t.errors_sha256 = std::string(64, 'c');
  t.inputs = {{"data_sha256", "d"}};
  return t;
}

std::string error_of(const Json& doc) {
  const auto table = parse_sensitivity(dump_json(doc), "S.json", small_config());
  return table.ok() ? "accepted" : table.error().message();
}

TEST(Sensitivity, table_is_written_and_read_back) {
  const Sensitivity t = small_table();
  const auto back = parse_sensitivity(sensitivity_json(t, small_config()), "S.json", small_config());
  ASSERT_TRUE(back.ok()) << back.error().message();
  EXPECT_TRUE(*back == t);
  EXPECT_EQ(back->factors_of(0).w2, 1.37);
  EXPECT_EQ(back->factors_of(1).w2, 1.5);
}

TEST(Sensitivity, amplitude_law_has_the_published_table) {
  // Source: quality.md 2.2, rfn^2 at 1 to 6 bits, three digits.
  const AmplitudeLaw law;
  const double published[] = {0.328, 0.0853, 0.0222, 0.00578, 0.00150, 0.00039};
  for (int bits = 1; bits <= 6; ++bits)
    EXPECT_NEAR(law.error(bits), published[bits - 1], 6e-3 * published[bits - 1]) << bits;
}

TEST(Sensitivity, every_broken_key_is_named) {
  const Json good = *parse_json(sensitivity_json(small_table(), small_config()), "good");
  ASSERT_EQ(error_of(good), "accepted");
  struct Case {
    std::function<void(Json&)> break_it;
    const char* message;
  };
  const Case cases[] = {
      {[](Json& d) { d["schema"] = "other"; }, "'schema': expected 'espalier-sensitivity-1', found \"other\""},
      {[](Json& d) { d["model"]["layers"] = 3; }, "'model.layers': expected 2 as in the checkpoint's config, found 3"},
      {[](Json& d) { d["model"].erase("experts"); }, "'model.experts' is missing"},
      {[](Json& d) { d["domains"] = Json::array(); }, "'domains': expected a list of 1"},
      {[](Json& d) { d["domains"][1]["name"] = "prose"; },
       "'domains.1.name': expected a name that no other domain has"},
      {[](Json& d) { d["domains"][0]["weight"] = d["domains"][1]["weight"] = 0; }, "at least one weight above 0"},
      {[](Json& d) { d["domains"][0]["additivity"] = -1; }, "'domains.0.additivity': expected a number in [0"},
      {[](Json& d) { d["layers"].erase(0); }, "'layers': expected a list of 2 layers"},
      {[](Json& d) { d["layers"][1].erase("slope_se"); }, "'layers.1.slope_se' is missing"},
      {[](Json& d) { d["layers"][0]["slope"] = {1}; },
       "'layers.0.slope': expected a list of 2 numbers, one per domain"},
      {[](Json& d) { d["layers"][0]["slope"][1] = "x"; }, "'layers.0.slope.1': expected a number"},
      {[](Json& d) { d["layers"][0]["swap"]["k2"]["se"] = 4; }, "'layers.0.swap.k2.se': expected a list"},
      {[](Json& d) {
         d["layers"][1]["matrix_factors"] = {{"w1", 0}, {"w3", 0}, {"w2", 0}};
       },
       "at least one factor above 0"},
      {[](Json& d) { d["amplitude"]["ratio"] = 0.5; }, "'amplitude.ratio': expected a number in [1"},
      {[](Json& d) { d["base"]["plan_sha256"] = "XYZ"; }, "'base.plan_sha256': expected 64 lower-case hex digits"},
      {[](Json& d) { d["routing_sha256"] = 5; }, "'routing_sha256': expected a string"},
      {[](Json& d) {
         d["inputs"] = {{"a", 1}};
       },
       "'inputs.a': expected a string"},
  };
  for (const Case& c : cases) {
    Json doc = good;
    c.break_it(doc);
    EXPECT_THAT(error_of(doc), HasSubstr(c.message));
  }
}

RoutingStatistics small_routing() {
  RoutingStatistics s;
  s.domains = {"prose", "code"};
  s.share = {0.5f, 0.4f, 0.3f, 0.3f, 0.2f, 0.3f, 0.9f, 0.8f, 0.05f, 0.1f, 0.05f, 0.1f};
  s.reads_routed = {1, 0.75f, 0.25f, 0.5f, 0.5f, 1};
  s.metadata = {{"data_sha256", "x"}};
  return s;
}

TEST(RoutingStatistics, file_is_written_and_read_back) {
  const std::string path = ::testing::TempDir() + "routing.safetensors";
  RoutingStatistics s = small_routing();
  s.reads_served = {0.5f, 0.75f, 0.25f, 0.5f, 0.25f, 1};
  ASSERT_TRUE(write_routing_statistics(path, s, small_config()).ok());
  const auto back = read_routing_statistics(path, small_config());
  ASSERT_TRUE(back.ok()) << back.error().message();
  EXPECT_EQ(back->domains, s.domains);
  EXPECT_EQ(back->share, s.share);
  EXPECT_EQ(back->reads_routed, s.reads_routed);
  EXPECT_EQ(back->reads_served, s.reads_served);
  EXPECT_EQ(back->sha256.size(), 64u);
}

TEST(RoutingStatistics, broken_files_are_refused_with_the_array) {
  const std::string path = ::testing::TempDir() + "routing-broken.safetensors";
  const auto message = [&](const RoutingStatistics& s, const Config& read_as) {
    EXPECT_TRUE(write_routing_statistics(path, s, small_config()).ok());
    const auto back = read_routing_statistics(path, read_as);
    return back.ok() ? std::string("accepted") : back.error().message();
  };
  EXPECT_EQ(message(small_routing(), small_config()), "accepted");
  Config other = small_config();
  other.n_layers = 4;
  EXPECT_THAT(message(small_routing(), other), HasSubstr("array 'share': expected F32 [4, 3, 2], found F32 [2, 3, 2]"));
  RoutingStatistics s = small_routing();
  s.share[3] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THAT(message(s, small_config()), HasSubstr("array 'share': expected 0 to 1e+06, found nan at index 3"));
  s = small_routing();
  s.reads_routed[5] = 1.5f;
  EXPECT_THAT(message(s, small_config()), HasSubstr("array 'reads_routed': expected 0 to 1.001, found 1.5"));
  s = small_routing();
  s.reads_routed = {1, 1, 1, 0, 0, 0};
  EXPECT_THAT(message(s, small_config()), HasSubstr("layer 0: expected at most 2 reads per token, found 3"));
  s = small_routing();
  s.domains = {"prose", "prose"};
  EXPECT_THAT(message(s, small_config()), HasSubstr("names, each once"));
  EXPECT_THAT(read_matrix_errors(path, small_config()).error().message(),
              HasSubstr("expected schema espalier-errors-1"));
}

TEST(MatrixErrors, file_is_written_and_read_back_with_gaps) {
  const std::string path = ::testing::TempDir() + "errors.safetensors";
  MatrixErrors e;
  e.widths = {4, 5, 6};
  for (int i = 0; i < 2 * 3 * 3 * 3; ++i) e.error.push_back(i % 7 == 0 ? std::nanf("") : 0.01f * static_cast<float>(i));
  ASSERT_TRUE(write_matrix_errors(path, e, small_config()).ok());
  const auto back = read_matrix_errors(path, small_config());
  ASSERT_TRUE(back.ok()) << back.error().message();
  EXPECT_EQ(back->widths, e.widths);
  for (size_t i = 0; i < e.error.size(); ++i) {
    EXPECT_TRUE(back->error[i] == e.error[i] || (std::isnan(back->error[i]) && std::isnan(e.error[i]))) << i;
  }
  e.widths = {4, 4, 6};
  ASSERT_TRUE(write_matrix_errors(path, e, small_config()).ok());
  EXPECT_THAT(read_matrix_errors(path, small_config()).error().message(), HasSubstr("ascending widths in half bits"));
  e.widths = {4, 6, 9};
  ASSERT_TRUE(write_matrix_errors(path, e, small_config()).ok());
  EXPECT_THAT(read_matrix_errors(path, small_config()).error().message(), HasSubstr("found 9"));
}

TEST(BlockSlopes, file_is_written_and_read_back_and_broken_ones_are_refused) {
  const std::string path = ::testing::TempDir() + "blocks.safetensors";
  BlockSlopes b;
  b.domains = {"prose", "code"};
  b.domain = {0, 1, 0};
  b.positions = {10, 20, 30};
  b.slope = {0.1f, 0.2f, 0.3f, -0.1f, 0.5f, 0.6f};
  ASSERT_TRUE(write_block_slopes(path, b, small_config()).ok());
  const auto back = read_block_slopes(path, small_config());
  ASSERT_TRUE(back.ok()) << back.error().message();
  EXPECT_EQ(back->domains, b.domains);
  EXPECT_EQ(back->domain, b.domain);
  EXPECT_EQ(back->positions, b.positions);
  EXPECT_EQ(back->slope, b.slope);
  const auto message = [&](const BlockSlopes& bad) {
    EXPECT_TRUE(write_block_slopes(path, bad, small_config()).ok());
    return read_block_slopes(path, small_config()).error().message();
  };
  BlockSlopes bad = b;
  bad.domain = {0, 0, 0};
  EXPECT_THAT(message(bad), HasSubstr("domain 'code' has no block"));
  bad = b;
  bad.domain[1] = 2;
  EXPECT_THAT(message(bad), HasSubstr("block 1: expected a domain below 2"));
  bad = b;
  bad.positions[2] = 0;
  EXPECT_THAT(message(bad), HasSubstr("block 2: expected a domain below 2 and positions above 0"));
  bad = b;
  bad.slope[3] = std::nanf("");
  EXPECT_THAT(message(bad), HasSubstr("array 'slope': expected finite numbers"));
}

}  // namespace
}  // namespace espalier
