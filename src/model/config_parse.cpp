#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "format/json.h"
#include "model/config.h"

namespace espalier {
namespace {

std::string shorten(std::string text) {
  if (text.size() > 80) text = text.substr(0, 77) + "...";
  return text;
}

// One key under its two spellings: Hugging Face (nested) and the vendor's (flat).
struct Key {
  const char* nested;
  const char* flat;
};

// Reads keys of one object and remembers the first error, so that the list of keys below reads as a table.
class Reader {
 public:
  Reader(const Json& object, std::string where, bool is_flat)
      : object_(object), where_(std::move(where)), is_flat_(is_flat) {}

  const Status& status() const { return status_; }
  bool ok() const { return status_.ok(); }

  void fail(const std::string& key, const std::string& expected, const std::string& found) {
    if (status_.ok()) status_ = data_loss(where_ + ": '" + key + "': expected " + expected + ", found " + found);
  }
  void refuse(const std::string& key, const std::string& supported, const std::string& found) {
    if (status_.ok()) {
      status_ = unimplemented(where_ + ": '" + key + "': only " + supported + " is supported, found " + found);
    }
  }

  const Json* find(const Key& key) const {
    const char* name = is_flat_ ? key.flat : key.nested;
    if (name == nullptr) return nullptr;
    const auto it = object_.find(name);
    return it == object_.end() ? nullptr : &*it;
  }
  std::string name(const Key& key) const {
    const char* n = is_flat_ ? key.flat : key.nested;
    return n != nullptr ? n : key.nested;
  }

  // A whole number in [low, high]. Absent: `fallback`, or an error without one.
  int64_t integer(const Key& key, int64_t low, int64_t high, std::optional<int64_t> fallback = std::nullopt) {
    const Json* v = find(key);
    const std::string range = "a whole number in [" + std::to_string(low) + ", " + std::to_string(high) + "]";
    if (v == nullptr) {
      if (!fallback) fail(name(key), range, "no such key");
      return fallback.value_or(low);
    }
    return as_integer(*v, name(key), low, high, range).value_or(low);
  }

  std::optional<int64_t> as_integer(const Json& v, const std::string& key, int64_t low, int64_t high,
                                    const std::string& expected) {
    int64_t value = 0;
    if (v.is_number_unsigned() && v.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      value = static_cast<int64_t>(v.get<uint64_t>());
    } else if (v.is_number_integer() && !v.is_number_unsigned()) {
      value = v.get<int64_t>();
    } else if (v.is_number_float() && v.get<double>() == std::floor(v.get<double>()) &&
               std::fabs(v.get<double>()) < 9e15) {
      value = static_cast<int64_t>(v.get<double>());
    } else {
      fail(key, expected, shorten(dump_json(v)));
      return std::nullopt;
    }
    if (value < low || value > high) {
      fail(key, expected, std::to_string(value));
      return std::nullopt;
    }
    return value;
  }

  double number(const Key& key, double low, double high, std::optional<double> fallback = std::nullopt) {
    const Json* v = find(key);
    const std::string range = "a number in [" + dump_json(Json(low)) + ", " + dump_json(Json(high)) + "]";
    if (v == nullptr) {
      if (!fallback) fail(name(key), range, "no such key");
      return fallback.value_or(low);
    }
    if (!v->is_number()) {
      fail(name(key), range, shorten(dump_json(*v)));
      return low;
    }
    const double value = v->get<double>();
    if (!(value >= low && value <= high)) fail(name(key), range, dump_json(*v));
    return value;
  }

  std::vector<int64_t> integers(const Key& key, int64_t low, int64_t high, size_t most) {
    std::vector<int64_t> out;
    const Json* v = find(key);
    const std::string expected = "a list of at most " + std::to_string(most) + " whole numbers in [" +
                                 std::to_string(low) + ", " + std::to_string(high) + "]";
    if (v == nullptr || !v->is_array() || v->size() > most) {
      fail(name(key), expected,
           v == nullptr     ? "no such key"
           : !v->is_array() ? shorten(dump_json(*v))
                            : "a list of " + std::to_string(v->size()));
      return out;
    }
    for (const Json& item : *v) {
      const auto value = as_integer(item, name(key), low, high, expected);
      if (!value) return {};
      out.push_back(*value);
    }
    return out;
  }

  std::vector<int> layers(const Key& key, int n_layers) {
    std::vector<int> out;
    for (int64_t l : integers(key, 0, std::max(n_layers - 1, 0), 4096)) {
      if (!out.empty() && l <= out.back()) fail(name(key), "ascending layer numbers", shorten(dump_json(*find(key))));
      out.push_back(static_cast<int>(l));
    }
    return out;
  }

  bool is(const char* key, const Json& value) const {
    const auto it = object_.find(key);
    return it != object_.end() && *it == value;
  }
  // The key must be absent or equal to `value`.
  void only(const char* key, const Json& value) {
    const auto it = object_.find(key);
    if (it != object_.end() && *it != value) refuse(key, dump_json(value), shorten(dump_json(*it)));
  }

 private:
  const Json& object_;
  std::string where_;
  bool is_flat_;
  Status status_;
};

void must_divide(Reader& r, const Key& key, int64_t value, const std::string& by, int64_t divisor) {
  if (r.ok() && value % divisor != 0) {
    r.fail(r.name(key), "a multiple of " + std::string(by), std::to_string(value));
  }
}

void read_dimensions(Reader& r, bool is_flat, Config& c) {
  constexpr int64_t kWide = 1 << 20;
  c.vocab = r.integer({"vocab_size", "vocab_size"}, 1, 1 << 24);
  c.d_model = r.integer({"hidden_size", "dim"}, 1, kWide);
  c.d_ff = r.integer({"moe_intermediate_size", "moe_inter_dim"}, 1, kWide);
  c.n_layers = static_cast<int>(r.integer({"num_hidden_layers", "n_layers"}, 1, 256));
  c.n_heads = r.integer({"num_attention_heads", "n_heads"}, 1, 4096);
  c.head_dim = r.integer({"head_dim", "head_dim"}, 2, 8192);
  c.rope_dim = r.integer({"qk_rope_head_dim", "rope_head_dim"}, 2, 8192);
  c.q_lora_rank = r.integer({"q_lora_rank", "q_lora_rank"}, 1, kWide);
  c.o_lora_rank = r.integer({"o_lora_rank", "o_lora_rank"}, 1, kWide);
  c.o_groups = r.integer({"o_groups", "o_groups"}, 1, 4096);
  c.swiglu_limit = r.number({"swiglu_limit", "swiglu_limit"}, 1e-6, 1e6);
  c.rms_norm_eps = r.number({"rms_norm_eps", "norm_eps"}, 0, 1);
  c.max_positions = r.integer({"max_position_embeddings", "max_seq_len"}, 1, int64_t{1} << 24,
                              is_flat ? std::optional<int64_t>(4096) : std::nullopt);
  c.rope_theta = r.number({"rope_theta", "rope_theta"}, 1.000001, 1e12);
  c.compress_rope_theta = r.number({"compress_rope_theta", "compress_rope_theta"}, 1.000001, 1e12);
  c.n_experts = r.integer({"n_routed_experts", "n_routed_experts"}, 1, 4096);
  c.n_active = r.integer({"num_experts_per_tok", "n_activated_experts"}, 1, 1024);
  c.routed_scale = r.number({"routed_scaling_factor", "route_scale"}, 1e-6, 1e6);
  c.gate_temp = r.number({"gate_temp", "gate_temp"}, 1e-6, 1e6, 1.0);
  c.window = r.integer({"sliding_window", "window_size"}, 1, 1 << 20);
  c.index_n_heads = r.integer({"index_n_heads", "index_n_heads"}, 1, 4096);
  c.index_head_dim = r.integer({"index_head_dim", "index_head_dim"}, 2, 8192);
  c.index_topk = r.integer({"index_topk", "index_topk"}, 1, 1 << 24);
  c.candidate_topk_blocks = r.integer({"candidate_topk_blocks", "candidate_topk_blocks"}, 1, 1 << 24);
  c.candidate_block_size = r.integer({"candidate_block_size", "candidate_block_size"}, 1, 1 << 20);
  c.n_streams = r.integer({"hc_mult", "hc_mult"}, 1, 8);
  c.sinkhorn_iters = static_cast<int>(r.integer({"hc_sinkhorn_iters", "hc_sinkhorn_iters"}, 1, 1000));
  c.hc_eps = r.number({"hc_eps", "hc_eps"}, 0, 1);
  const int64_t n_shared = r.integer({"n_shared_experts", "n_shared_experts"}, 0, 1024);
  if (r.ok() && n_shared != 1) r.refuse("n_shared_experts", "1", std::to_string(n_shared));

  must_divide(r, {"qk_rope_head_dim", "rope_head_dim"}, c.rope_dim, "2", 2);
  if (r.ok() && c.rope_dim > c.head_dim)
    r.fail(r.name({"qk_rope_head_dim", "rope_head_dim"}), "at most head_dim " + std::to_string(c.head_dim),
           std::to_string(c.rope_dim));
  if (r.ok() && c.rope_dim > c.index_head_dim)
    r.fail(r.name({"qk_rope_head_dim", "rope_head_dim"}), "at most index_head_dim " + std::to_string(c.index_head_dim),
           std::to_string(c.rope_dim));
  must_divide(r, {"num_attention_heads", "n_heads"}, c.n_heads, "o_groups (" + std::to_string(c.o_groups) + ")",
              c.o_groups);
  must_divide(r, {"hidden_size", "dim"}, c.d_model, "32", 32);
  must_divide(r, {"moe_intermediate_size", "moe_inter_dim"}, c.d_ff, "32", 32);
  if (r.ok() && c.n_active > c.n_experts)
    r.fail(r.name({"num_experts_per_tok", "n_activated_experts"}), "at most " + std::to_string(c.n_experts),
           std::to_string(c.n_active));
  if (r.ok() && c.n_heads * c.head_dim > (1 << 24))
    r.fail("head_dim", "heads times head_dim at most 16777216", std::to_string(c.n_heads * c.head_dim));
}

void read_yarn(Reader& r, const Json& object, bool is_flat, const std::string& where, Config& c) {
  if (is_flat) {
    c.yarn.factor = r.number({nullptr, "rope_factor"}, 1, 1e6);
    c.yarn.beta_fast = r.number({nullptr, "beta_fast"}, 1e-3, 1e6);
    c.yarn.beta_slow = r.number({nullptr, "beta_slow"}, 1e-3, 1e6);
    c.yarn.original_positions = r.integer({nullptr, "original_seq_len"}, 1, int64_t{1} << 40);
    return;
  }
  const auto it = object.find("rope_scaling");
  if (it == object.end() || !it->is_object()) {
    return r.fail("rope_scaling", "an object with rope_type yarn",
                  it == object.end() ? "no such key" : shorten(dump_json(*it)));
  }
  const auto type = it->find("rope_type");
  if (type == it->end() || *type != "yarn") {
    return r.refuse("rope_scaling.rope_type", "\"yarn\"",
                    type == it->end() ? "no such key" : shorten(dump_json(*type)));
  }
  Reader y(*it, where + ": rope_scaling", false);
  c.yarn.factor = y.number({"factor", nullptr}, 1, 1e6);
  c.yarn.beta_fast = y.number({"beta_fast", nullptr}, 1e-3, 1e6);
  c.yarn.beta_slow = y.number({"beta_slow", nullptr}, 1e-3, 1e6);
  c.yarn.original_positions = y.integer({"original_max_position_embeddings", nullptr}, 1, int64_t{1} << 40);
  for (const char* key : {"mscale", "mscale_all_dim", "attention_factor"}) {
    if (it->contains(key)) y.refuse(key, "no attention scaling", shorten(dump_json((*it)[key])));
  }
  if (!y.ok() && r.ok()) r.fail("rope_scaling", "valid YaRN values", y.status().message());
}

void read_schedule(Reader& r, Config& c) {
  const Key ratios_key{"compress_ratios", "compress_ratios"};
  for (int64_t m : r.integers(ratios_key, 0, 1 << 16, 4096)) c.compress_ratios.push_back(static_cast<int>(m));
  const size_t expected = static_cast<size_t>(c.n_layers + c.drafter.n_stages);
  if (r.ok() && c.compress_ratios.size() != expected) {
    r.fail("compress_ratios", std::to_string(expected) + " entries (layers + drafter stages)",
           std::to_string(c.compress_ratios.size()));
  }
  const Key kv{"kv_source_layer_ids", "kv_source_layers"};
  const Key index{"index_source_layer_ids", "index_source_layers"};
  c.kv_sources = r.layers(kv, c.n_layers);
  c.index_sources = r.layers(index, c.n_layers);
  const Key candidate{"candidate_source_layer_id", "candidate_source_layer"};
  const Json* source = r.find(candidate);
  c.candidate_source =
      source == nullptr || source->is_null() ? -1 : static_cast<int>(r.integer(candidate, -1, c.n_layers - 1));
  if (!r.ok()) return;
  for (int stage = 0; stage < c.drafter.n_stages; ++stage) {
    if (c.ratio(c.n_layers + stage) != 0) {
      return r.refuse("compress_ratios", "0 for drafter stages", std::to_string(c.ratio(c.n_layers + stage)));
    }
  }
  for (int l : c.kv_sources) {
    if (c.ratio(l) == 0)
      return r.fail(r.name(kv), "layers with a compress ratio above 0", "layer " + std::to_string(l));
    if (!c.is_index_source(l)) return r.fail(r.name(index), "every kv source", "no layer " + std::to_string(l));
  }
  for (int l : c.index_sources) {
    if (c.ratio(l) == 0)
      return r.fail(r.name(index), "layers with a compress ratio above 0", "layer " + std::to_string(l));
  }
  for (int l = 0; l < c.n_layers; ++l) {
    if (c.ratio(l) == 0) continue;
    const int owner = c.kv_source_of(l);
    if (owner < 0 || c.index_source_of(l) < 0) {
      return r.fail(r.name(kv), "a source at or below every compressed layer", "none for layer " + std::to_string(l));
    }
    if (c.ratio(owner) != c.ratio(l) || c.ratio(c.index_source_of(l)) != c.ratio(l)) {
      return r.fail("compress_ratios", "the ratio of layer " + std::to_string(l) + "'s sources",
                    std::to_string(c.ratio(l)));
    }
    if (c.index_source_of(l) < owner) {
      return r.fail(r.name(index), "an index source at or above the kv source of layer " + std::to_string(l), "none");
    }
  }
  if (c.candidate_source >= 0 && !c.is_index_source(c.candidate_source)) {
    return r.fail(r.name(candidate), "an index source", std::to_string(c.candidate_source));
  }
  for (int l : c.index_sources) {
    if (c.applies_candidates(l) && c.kv_source_of(l) != c.kv_source_of(c.candidate_source)) {
      return r.refuse(r.name(candidate), "a candidate source whose keys all later index sources share",
                      "index source " + std::to_string(l));
    }
  }
}

void read_engram(Reader& r, Config& c) {
  EngramConfig& e = c.engram;
  e.layers = r.layers({"engram_layer_ids", "engram_layer_ids"}, c.n_layers);
  if (!r.ok() || e.layers.empty()) return;
  e.max_ngram = r.integer({"engram_max_ngram_size", "engram_max_ngram_size"}, 2, 16);
  e.vocab = r.integer({"engram_vocab_size", "engram_vocab_size"}, 2, int64_t{1} << 31);
  e.n_heads = r.integer({"engram_n_heads", "engram_n_heads"}, 1, 256);
  e.head_dim = r.integer({"engram_head_dim", "engram_head_dim"}, 1, 65536);
  e.pad_token_id =
      static_cast<int32_t>(r.integer({"engram_pad_token_id", "engram_pad_id"}, 0, std::max<int64_t>(c.vocab - 1, 0)));
  e.n_classes = r.integer({"engram_compressed_vocab_size", "engram_compressed_vocab_size"}, 1, 1 << 24);
  e.n_rows = r.integers({"engram_num_embeddings", "engram_num_embeddings"}, 1, int64_t{1} << 40, 4096);
  must_divide(r, {"engram_head_dim", "engram_head_dim"}, e.head_dim, "32", 32);
  if (r.ok() && e.n_rows.size() != e.layers.size()) {
    r.fail("engram_num_embeddings", std::to_string(e.layers.size()) + " entries (Engram layers)",
           std::to_string(e.n_rows.size()));
  }
  if (r.ok() && e.layers.size() * static_cast<size_t>(e.n_columns()) > 4096) {
    r.fail("engram_n_heads", "at most 4096 hash columns in all",
           std::to_string(e.layers.size() * static_cast<size_t>(e.n_columns())));
  }
}

void read_drafter(Reader& r, Config& c) {
  DrafterConfig& d = c.drafter;
  d.n_stages = static_cast<int>(r.integer({"num_nextn_predict_layers", "n_mtp_layers"}, 0, 64, 0));
  if (d.n_stages == 0) return;
  d.block_size = r.integer({"dspark_block_size", "dspark_block_size"}, 1, 64);
  d.noise_token_id = static_cast<int32_t>(
      r.integer({"dspark_noise_token_id", "dspark_noise_token_id"}, 0, std::max<int64_t>(c.vocab - 1, 0)));
  d.target_layers = r.layers({"dspark_target_layer_ids", "dspark_target_layer_ids"}, c.n_layers);
  d.markov_rank = r.integer({"dspark_markov_rank", "dspark_markov_rank"}, 1, 65536);
  d.n_experts = r.integer({"dspark_n_routed_experts", "dspark_n_routed_experts"}, 1, 4096);
  d.n_active = r.integer({"dspark_num_experts_per_tok", "dspark_n_activated_experts"}, 1, 1024);
  if (r.ok() && d.target_layers.empty()) r.fail("dspark_target_layer_ids", "at least one layer", "an empty list");
  if (r.ok() && d.n_active > d.n_experts)
    r.fail(r.name({"dspark_num_experts_per_tok", "dspark_n_activated_experts"}),
           "at most " + std::to_string(d.n_experts), std::to_string(d.n_active));
}

// Settings that have one supported value.
void refuse_unknown_values(Reader& root, Reader& text, bool has_text, bool is_flat) {
  if (is_flat) {
    text.only("score_func", "sqrtsoftplus");
    text.only("norm_topk_prob", true);
    text.only("dtype", "fp8");
    text.only("expert_dtype", "fp4");
    return;
  }
  if (has_text) text.only("model_type", "deepseek_v41_text");
  if (has_text || !text.is("model_type", "deepseek_v41_text")) root.only("model_type", "deepseek_v41");
  text.only("hidden_act", "silu");
  text.only("scoring_func", "sqrtsoftplus");
  text.only("topk_method", "noaux_tc");
  text.only("norm_topk_prob", true);
  text.only("num_key_value_heads", 1);
  text.only("attention_bias", false);
  text.only("attention_dropout", 0.0);
  text.only("tie_word_embeddings", false);
  text.only("num_hash_layers", 0);
}

void read_fp8_format(Reader& r, const Json& object, Config& c) {
  Reader q(object, "quantization_config", false);
  q.only("scale_fmt", "ue8m0");
  q.only("expert_dtype", "fp4");
  q.only("activation_scheme", "dynamic");
  const std::vector<int64_t> block = q.integers({"weight_block_size", nullptr}, 1, 4096, 2);
  if (q.ok() && block.size() != 2) q.fail("weight_block_size", "two numbers", std::to_string(block.size()));
  if (!q.ok()) {
    if (q.status().code() == StatusCode::kUnimplemented)
      return r.refuse("quantization_config", "the released FP8 format", q.status().message());
    return r.fail("quantization_config", "the released FP8 format", q.status().message());
  }
  c.fp8_block_rows = block[0];
  c.fp8_block_cols = block[1];
}

void read_quantization(Reader& r, const Json& root, Config& c) {
  const auto it = root.find("quantization_config");
  if (it == root.end() || it->is_null()) return;
  if (!it->is_object()) return r.fail("quantization_config", "an object", shorten(dump_json(*it)));
  const auto method = it->find("quant_method");
  if (method == it->end() || !method->is_string()) {
    return r.fail("quantization_config.quant_method", "a string",
                  method == it->end() ? "no such key" : shorten(dump_json(*method)));
  }
  const std::string name = method->get<std::string>();
  if (name == "exl3" || name == "deepseek_v41_exl3") {
    // Widths come from the tensors themselves; what stayed FP8 keeps the blocks of the checkpoint.
    const auto original = it->find("original_quantization_config");
    if (original == it->end() || !original->is_object() || !original->contains("quant_method") ||
        (*original)["quant_method"] != "fp8") {
      return;
    }
    return read_fp8_format(r, *original, c);
  }
  if (name != "fp8") return r.refuse("quantization_config.quant_method", "fp8 or exl3", name);
  read_fp8_format(r, *it, c);
}

}  // namespace

Result<Config> parse_config(std::string_view json_text, std::string_view name) {
  const std::string where(name);
  ASSIGN_OR_RETURN(const Json root, parse_json(json_text, name));
  if (!root.is_object()) return data_loss(where + ": expected an object, found " + shorten(dump_json(root)));
  const auto nested = root.find("text_config");
  // Three forms: the text model's keys in text_config, the same keys at the top, the vendor's own names at the top.
  const bool has_text = nested != root.end();
  const bool is_flat = !has_text && !root.contains("num_hidden_layers");
  if (has_text && !nested->is_object())
    return data_loss(where + ": 'text_config': expected an object, found " + shorten(dump_json(*nested)));
  const Json& text_object = has_text ? *nested : root;
  Config c;
  Reader r(root, where, is_flat);
  Reader t(text_object, has_text ? where + ": text_config" : where, is_flat);
  refuse_unknown_values(r, t, has_text, is_flat);
  read_dimensions(t, is_flat, c);
  read_yarn(t, text_object, is_flat, where, c);
  if (t.ok()) read_drafter(t, c);
  if (t.ok()) read_schedule(t, c);
  if (t.ok()) read_engram(t, c);
  RETURN_IF_ERROR(r.status());
  RETURN_IF_ERROR(t.status());
  const int64_t top = c.vocab - 1;
  c.bos_token_id = static_cast<int32_t>(r.integer({"bos_token_id", "bos_token_id"}, 0, top, std::min<int64_t>(0, top)));
  c.eos_token_id = static_cast<int32_t>(r.integer({"eos_token_id", "eos_token_id"}, 0, top, std::min<int64_t>(1, top)));
  c.pad_token_id = static_cast<int32_t>(r.integer({"pad_token_id", "pad_token_id"}, 0, top, std::min<int64_t>(2, top)));
  c.image_token_id = static_cast<int32_t>(r.integer({"image_token_id", "image_token_id"}, -1, top, -1));
  c.has_vision =
      is_flat ? root.contains("vision_n_layers") : root.contains("vision_config") && !root["vision_config"].is_null();
  read_quantization(r, root, c);
  RETURN_IF_ERROR(r.status());
  return c;
}

}  // namespace espalier
