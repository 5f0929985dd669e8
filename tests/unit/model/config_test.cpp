// config.json: both layouts, and every refusal by name.
#include "model/config.h"

#include <nlohmann/json.hpp>

#include "base/file.h"
#include "format/json.h"
#include "model/engram.h"
#include "unit/model/golden_fixture.h"

namespace espalier {
namespace {

using nlohmann::ordered_json;

std::string tiny_text(const std::string& file = "config.json") {
  auto text = read_text_file(golden_dir() + "/tiny-a/" + file);
  CHECK(text.ok()) << text.error().message();
  return *text;
}

// Parses the tiny config with one change to its text_config.
Status with(const std::string& key, const ordered_json& value) {
  ordered_json json = ordered_json::parse(tiny_text());
  json["text_config"][key] = value;
  return parse_config(json.dump(), "config.json").status();
}

Status without(const std::string& key) {
  ordered_json json = ordered_json::parse(tiny_text());
  json["text_config"].erase(key);
  return parse_config(json.dump(), "config.json").status();
}

TEST(Config, text_keys_at_the_top_are_read_as_in_text_config) {
  Json json = parse_json(tiny_text(), "config.json").value();
  const Json text = json["text_config"];
  json.erase("text_config");
  for (const auto& [key, value] : text.items()) json[key] = value;
  const auto top = parse_config(dump_json(json), "config.json");
  ASSERT_TRUE(top.ok()) << top.error().message();
  const auto nested = parse_config(tiny_text(), "config.json");
  EXPECT_EQ(top->compress_ratios, nested->compress_ratios);
  EXPECT_EQ(top->engram.n_rows, nested->engram.n_rows);
  EXPECT_EQ(top->max_positions, nested->max_positions);
  EXPECT_EQ(top->has_vision, nested->has_vision);
  json["model_type"] = "deepseek_v41";
  EXPECT_TRUE(parse_config(dump_json(json), "config.json").ok());
  json["model_type"] = "llama";
  EXPECT_FALSE(parse_config(dump_json(json), "config.json").ok());
  json.erase("model_type");
  json.erase("engram_layer_ids");
  const auto lacks = parse_config(dump_json(json), "config.json");
  ASSERT_FALSE(lacks.ok());
  EXPECT_NE(lacks.error().message().find("'engram_layer_ids'"), std::string::npos) << lacks.error().message();
}

TEST(Config, nested_and_flat_files_give_the_same_dimensions) {
  const auto nested = parse_config(tiny_text(), "config.json");
  const auto flat = parse_config(tiny_text("vendor_args.json"), "vendor_args.json");
  ASSERT_TRUE(nested.ok()) << nested.error().message();
  ASSERT_TRUE(flat.ok()) << flat.error().message();
  for (const Config& c : {*nested, *flat}) {
    EXPECT_EQ(c.vocab, 512);
    EXPECT_EQ(c.d_model, 256);
    EXPECT_EQ(c.d_ff, 128);
    EXPECT_EQ(c.n_layers, 8);
    EXPECT_EQ(c.n_heads, 4);
    EXPECT_EQ(c.head_dim, 128);
    EXPECT_EQ(c.rope_dim, 32);
    EXPECT_EQ(c.q_lora_rank, 128);
    EXPECT_EQ(c.o_groups, 2);
    EXPECT_EQ(c.swiglu_limit, 2.5);
    EXPECT_EQ(c.rms_norm_eps, 1e-20);
    EXPECT_EQ(c.yarn.factor, 16);
    EXPECT_EQ(c.yarn.original_positions, 32);
    EXPECT_EQ(c.compress_ratios, (std::vector<int>{0, 0, 2, 2, 2, 1, 1, 1, 0, 0}));
    EXPECT_EQ(c.kv_sources, (std::vector<int>{2, 4, 5}));
    EXPECT_EQ(c.index_sources, (std::vector<int>{2, 4, 5, 7}));
    EXPECT_EQ(c.candidate_source, 5);
    EXPECT_EQ(c.engram.n_rows, (std::vector<int64_t>{630, 834}));
    EXPECT_EQ(c.drafter.n_stages, 2);
    EXPECT_EQ(c.drafter.target_layers, (std::vector<int>{5, 6, 7}));
    EXPECT_EQ(c.image_token_id, 511);
    EXPECT_TRUE(c.has_vision);
  }
  EXPECT_EQ(nested->max_positions, 1048576);
  EXPECT_EQ(flat->max_positions, 4096);  // the vendor's run-time default
}

TEST(Config, schedule_names_the_source_of_every_layer) {
  const auto c = parse_config(tiny_text(), "config.json");
  ASSERT_TRUE(c.ok());
  const int kv[] = {-1, -1, 2, 2, 4, 5, 5, 5};
  const int index[] = {-1, -1, 2, 2, 4, 5, 5, 7};
  for (int l = 0; l < 8; ++l) {
    EXPECT_EQ(c->kv_source_of(l), kv[l]) << l;
    EXPECT_EQ(c->index_source_of(l), index[l]) << l;
    EXPECT_EQ(c->applies_candidates(l), l == 7) << l;
  }
  EXPECT_EQ(c->engram_slot(4), 1);
  EXPECT_EQ(c->engram_slot(3), -1);
}

struct Refusal {
  const char* key;
  ordered_json value;
  StatusCode code;
};

TEST(Config, values_that_are_not_supported_are_refused_by_name) {
  const std::vector<Refusal> cases = {
      {"scoring_func", "sigmoid", StatusCode::kUnimplemented},
      {"topk_method", "greedy", StatusCode::kUnimplemented},
      {"hidden_act", "gelu", StatusCode::kUnimplemented},
      {"norm_topk_prob", false, StatusCode::kUnimplemented},
      {"n_shared_experts", 2, StatusCode::kUnimplemented},
      {"num_key_value_heads", 8, StatusCode::kUnimplemented},
      {"attention_bias", true, StatusCode::kUnimplemented},
      {"tie_word_embeddings", true, StatusCode::kUnimplemented},
      {"num_hash_layers", 3, StatusCode::kUnimplemented},
      {"rope_scaling", {{"rope_type", "linear"}, {"factor", 2}}, StatusCode::kUnimplemented},
      {"model_type", "deepseek_v4_text", StatusCode::kUnimplemented},
      {"hidden_size", 250, StatusCode::kDataLoss},
      {"hidden_size", -256, StatusCode::kDataLoss},
      {"hidden_size", "256", StatusCode::kDataLoss},
      {"hidden_size", 256.5, StatusCode::kDataLoss},
      {"hidden_size", 1e300, StatusCode::kDataLoss},
      {"qk_rope_head_dim", 33, StatusCode::kDataLoss},
      {"qk_rope_head_dim", 256, StatusCode::kDataLoss},
      {"num_attention_heads", 5, StatusCode::kDataLoss},
      {"num_experts_per_tok", 9, StatusCode::kDataLoss},
      {"compress_ratios", {0, 0, 2}, StatusCode::kDataLoss},
      {"compress_ratios", {0, 0, 2, 2, 2, 1, 1, 1, 0, 1}, StatusCode::kUnimplemented},
      {"compress_ratios", {0, 0, 2, 1, 2, 1, 1, 1, 0, 0}, StatusCode::kDataLoss},
      {"kv_source_layer_ids", {4, 5}, StatusCode::kDataLoss},
      {"kv_source_layer_ids", {2, 5, 4}, StatusCode::kDataLoss},
      {"kv_source_layer_ids", {2, 4, 9}, StatusCode::kDataLoss},
      {"index_source_layer_ids", {2, 4, 7}, StatusCode::kDataLoss},
      {"candidate_source_layer_id", 6, StatusCode::kDataLoss},
      {"engram_num_embeddings", {630}, StatusCode::kDataLoss},
      {"engram_layer_ids", {1, 1}, StatusCode::kDataLoss},
      {"engram_head_dim", 48, StatusCode::kDataLoss},
      {"dspark_target_layer_ids", ordered_json::array(), StatusCode::kDataLoss},
      {"swiglu_limit", 0, StatusCode::kDataLoss},
  };
  for (const Refusal& c : cases) {
    const Status s = with(c.key, c.value);
    EXPECT_EQ(s.code(), c.code) << c.key << " = " << c.value << ": " << s.message();
    EXPECT_NE(s.message().find("found"), std::string::npos) << s.message();
    EXPECT_NE(s.message().find(c.key), std::string::npos) << s.message();
    EXPECT_NE(s.message().find("config.json"), std::string::npos) << s.message();
  }
}

TEST(Config, missing_keys_are_named) {
  for (const char* key :
       {"hidden_size", "rope_scaling", "compress_ratios", "engram_num_embeddings", "dspark_block_size", "hc_mult"}) {
    const Status s = without(key);
    EXPECT_EQ(s.code(), StatusCode::kDataLoss) << key;
    EXPECT_NE(s.message().find(key), std::string::npos) << s.message();
  }
}

TEST(Config, text_that_is_not_a_config_is_refused) {
  for (const char* text :
       {"", "{", "[]", "null", "{}", "{\"text_config\": 3}", "{\"text_config\": {}}", "nan", "{\"a\":1,\"a\":2}"}) {
    EXPECT_FALSE(parse_config(text, "config.json").ok()) << text;
  }
}

TEST(Config, quantization_formats_other_than_the_released_one_are_refused) {
  ordered_json json = ordered_json::parse(tiny_text());
  json["quantization_config"]["scale_fmt"] = "float";
  EXPECT_EQ(parse_config(json.dump(), "config.json").status().code(), StatusCode::kUnimplemented);
  json = ordered_json::parse(tiny_text());
  json["quantization_config"]["quant_method"] = "awq";
  EXPECT_EQ(parse_config(json.dump(), "config.json").status().code(), StatusCode::kUnimplemented);
  json["quantization_config"] = {{"quant_method", "exl3"}, {"bits", 3.0}};
  EXPECT_TRUE(parse_config(json.dump(), "config.json").ok());
}

// The constants of the released model and of its 1017 refresh follow from the numbers in its config (model.md 7.2).
TEST(Engram, released_primes_offsets_and_multipliers_follow_from_the_config) {
  Config c;
  c.engram.layers = {1, 14};
  c.engram.n_rows = {384006168, 384016682};
  c.engram.max_ngram = 4;
  c.engram.vocab = 16000000;
  c.engram.n_heads = 8;
  c.engram.head_dim = 256;
  c.engram.n_classes = 99092;
  const auto hashes = make_engram_hashes(c);
  ASSERT_TRUE(hashes.ok()) << hashes.error().message();
  EXPECT_EQ((*hashes)[0].primes.front(), 16000057);
  EXPECT_EQ((*hashes)[0].primes.back(), 16000463);
  EXPECT_EQ((*hashes)[1].primes.front(), 16000477);
  EXPECT_EQ((*hashes)[1].primes.back(), 16000889);
  EXPECT_EQ((*hashes)[0].multipliers,
            (std::vector<int64_t>{76632096046245, 4839876093313, 35959672319349, 73987337458391}));
  EXPECT_EQ((*hashes)[1].multipliers,
            (std::vector<int64_t>{67716810739261, 51510806800915, 30921347202721, 82619226485591}));

  // Published test vector: current token class 1000, then 2000, 3000, 4000 looking back.
  const std::vector<int32_t> history = {4000, 3000, 2000, 1000};
  std::vector<int64_t> rows(24);
  engram_rows((*hashes)[0], history, 3, 2, 8, rows.data());
  EXPECT_EQ(rows, (std::vector<int64_t>{2490620,   30742399,  43508771,  49736205,  75400613,  94708347,
                                        104378374, 122161697, 141932547, 152141891, 163307126, 176705110,
                                        195924637, 213571307, 224086977, 255415522, 264700880, 276602590,
                                        301365869, 305879126, 324937183, 345597303, 361149035, 375488643}));
  engram_rows((*hashes)[1], history, 3, 2, 8, rows.data());
  EXPECT_EQ(rows, (std::vector<int64_t>{13209604,  27196187,  47300532,  55442865,  67536165,  80841902,
                                        96369704,  120577284, 136676902, 155853486, 162110656, 184514255,
                                        206984010, 220009172, 236724639, 253058204, 262006302, 278444999,
                                        300656409, 317176764, 330486514, 337310662, 359115282, 372276798}));
  c.engram.n_rows = {384006168, 384016683};
  const Status wrong = make_engram_hashes(c).status();
  EXPECT_EQ(wrong.code(), StatusCode::kDataLoss);
  EXPECT_NE(wrong.message().find("384016682"), std::string::npos) << wrong.message();
}

TEST(Engram, golden_constants_and_token_map_equal_the_vendors) {
  const Model& m = *tiny_model();
  std::vector<int64_t> primes, offsets, multipliers;
  for (const EngramHash& h : m.engram_hashes) {
    primes.insert(primes.end(), h.primes.begin(), h.primes.end());
    offsets.insert(offsets.end(), h.offsets.begin(), h.offsets.end());
    multipliers.insert(multipliers.end(), h.multipliers.begin(), h.multipliers.end());
  }
  EXPECT_EQ(primes, common().integers("engram.primes"));
  EXPECT_EQ(offsets, common().integers("engram.offsets"));
  EXPECT_EQ(multipliers, common().integers("engram.multipliers"));
  EXPECT_EQ(m.engram_token_map, common().ids("engram.token_map"));
  EXPECT_EQ(m.engram_token_map[2], common().integers("engram.pad_class")[0]);
}

TEST(Engram, a_dead_or_missing_token_blocks_all_deeper_look_backs) {
  const EngramHash& hash = tiny_model()->engram_hashes[0];
  const std::vector<int32_t> dead = {5, 6, kEngramDead, 8, 9};
  const std::vector<int32_t> other = {7, 3, kEngramDead, 8, 9};
  std::vector<int64_t> a(6), b(6);
  engram_rows(hash, dead, 4, 2, 2, a.data());
  engram_rows(hash, other, 4, 2, 2, b.data());
  EXPECT_EQ(a, b);
  const std::vector<int32_t> alone = {8, 9};
  engram_rows(hash, alone, 1, 2, 2, b.data());
  EXPECT_EQ(a, b);
}

}  // namespace
}  // namespace espalier
