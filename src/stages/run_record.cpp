#include "stages/run_record.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

namespace espalier {
namespace {

Json number(double bits) { return bits == std::floor(bits) ? Json(static_cast<int>(bits)) : Json(bits); }

Json encoder_json(const codec::QuantizeOptions& o) {
  const auto exponent = [](double e) { return e < 0 ? Json("default") : Json(e); };
  return {{"row_exponents", {o.scale_rule.row_weight, o.scale_rule.row_hessian}},
          {"column_exponent", exponent(o.scale_rule.column_weight)},
          {"normalise_blocks", o.scale_rule.normalise_blocks},
          {"two_sided", o.two_sided},
          {"spread_tiles", o.spread_tiles},
          {"cuts", o.n_cuts},
          {"descent_sweeps", o.descent_sweeps},
          {"refit_rounds", o.refit_rounds},
          {"draws", o.n_draws}};
}

// Reads members of one object and remembers the first thing that is not what it should be.
class Reader {
 public:
  Reader(const Json& object, std::string where) : object_(object), where_(std::move(where)) {}

  const Status& status() const { return status_; }

  const Json* find(const char* key) const {
    const auto it = object_.is_object() ? object_.find(key) : object_.end();
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  void fail(const std::string& key, const std::string& expected) {
    const Json* found = find(key.c_str());
    if (status_.ok()) {
      status_ = data_loss(where_ + ": '" + key + "': expected " + expected + ", found " +
                          (found == nullptr ? "no such key" : dump_json(*found).substr(0, 60)));
    }
  }
  double real(const char* key, double low, double high) {
    const Json* v = find(key);
    if (v != nullptr && v->is_number() && v->get<double>() >= low && v->get<double>() <= high) return v->get<double>();
    fail(key, "a number in [" + std::to_string(low) + ", " + std::to_string(high) + "]");
    return low;
  }
  int64_t whole(const char* key, int64_t low, int64_t high) {
    const Json* v = find(key);
    const bool ok = v != nullptr && v->is_number_unsigned() && v->get<uint64_t>() <= static_cast<uint64_t>(high) &&
                    v->get<int64_t>() >= low;
    if (!ok) fail(key, "a whole number in [" + std::to_string(low) + ", " + std::to_string(high) + "]");
    return ok ? v->get<int64_t>() : low;
  }
  bool flag(const char* key) {
    const Json* v = find(key);
    if (v == nullptr || !v->is_boolean()) fail(key, "true or false");
    return v != nullptr && v->is_boolean() && v->get<bool>();
  }
  std::string text(const char* key) {
    const Json* v = find(key);
    if (v == nullptr || !v->is_string()) fail(key, "a string");
    return v != nullptr && v->is_string() ? v->get<std::string>() : "";
  }
  // A number, or a word that stands for the default.
  std::optional<double> real_or_word(const char* key, double low, double high) {
    const Json* v = find(key);
    if (v != nullptr && v->is_string()) return std::nullopt;
    return real(key, low, high);
  }
  std::optional<double> width(const char* key) {
    return find(key) == nullptr ? std::nullopt : std::optional<double>(real(key, 1, 8));
  }

 private:
  const Json& object_;
  std::string where_;
  Status status_;
};

Status read_encoder(const Json& object, const std::string& where, codec::QuantizeOptions* o) {
  Reader r(object, where);
  const Json* rows = r.find("row_exponents");
  if (rows == nullptr || !rows->is_array() || rows->size() != 2 || !(*rows)[0].is_number() || !(*rows)[1].is_number()) {
    r.fail("row_exponents", "two numbers");
    return r.status();
  }
  o->scale_rule.row_weight = (*rows)[0].get<double>();
  o->scale_rule.row_hessian = (*rows)[1].get<double>();
  o->scale_rule.column_weight = r.real_or_word("column_exponent", 0, 2).value_or(-1);
  o->scale_rule.normalise_blocks = r.flag("normalise_blocks");
  o->two_sided = r.flag("two_sided");
  o->spread_tiles = static_cast<int>(r.whole("spread_tiles", 0, 4096));
  o->n_cuts = static_cast<int>(r.whole("cuts", 1, 4));
  o->descent_sweeps = static_cast<int>(r.whole("descent_sweeps", 0, 100));
  o->refit_rounds = static_cast<int>(r.whole("refit_rounds", 0, 100));
  o->n_draws = static_cast<int>(r.whole("draws", 1, 1000));
  return r.status();
}

}  // namespace

Json options_json(const QuantizeOptions& q, int64_t rows) {
  const auto width = [&](const std::optional<double>& bits) { return bits ? number(*bits) : Json(nullptr); };
  const auto prior = [](const std::optional<double>& n0) { return n0 ? Json(*n0) : Json("default"); };
  return {{"bits", number(q.bits)},
          {"dense_bits", width(q.dense_bits)},
          {"head_bits", width(q.head_bits)},
          {"drafter_bits", width(q.drafter_bits)},
          {"keep_native", q.keep_native},
          {"codebook", codec::codebook_name(q.encode.codec.codebook)},
          {"seed", q.encode.codec.seed},
          {"damping", q.encode.damping ? Json(*q.encode.damping) : Json("by effective tokens")},
          {"preset", codec::preset_name(q.encode.preset)},
          {"encoder", encoder_json(q.encode.codec)},
          {"shared_scales", q.encode.shared_scales},
          {"output_metrics", q.encode.output_metrics ? "model" : "none"},
          {"routing_exponent", q.encode.routing_exponent},
          {"prior_tokens_w13", prior(q.encode.prior_w13)},
          {"prior_tokens_w2", prior(q.encode.prior_w2)},
          {"prior_sample", q.encode.prior_sample},
          {"w2_input", q.encode.w2_input == W2Input::kNative ? "native" : "quantized"},
          {"stream", q.stream == StreamFrom::kNative ? "native" : "quantized"},
          {"draft_stride", q.draft_stride},
          {"numerics", numerics_name(q.numerics)},
          {"rows", rows}};
}

Result<RunRecord> parse_run_record(std::string_view json_text, std::string_view what) {
  const std::string where(what);
  ASSIGN_OR_RETURN(const Json root, parse_json(json_text, what));
  Reader top(root, where);
  const Json* inputs = top.find("inputs");
  const Json* object = top.find("options");
  if (inputs == nullptr || object == nullptr || !object->is_object()) {
    top.fail(inputs == nullptr ? "inputs" : "options", "an object");
    return top.status();
  }
  RunRecord record;
  record.tool = top.text("tool");
  record.backend = top.find("backend") == nullptr ? kBackend : top.text("backend");
  Reader in(*inputs, where + ": inputs");
  record.calibration_content_sha256 = in.text("calibration_content_sha256");

  Reader r(*object, where + ": options");
  QuantizeOptions& q = record.quantize;
  q.bits = r.find("bits") == nullptr ? 0 : r.real("bits", 0, 8);
  q.dense_bits = r.width("dense_bits");
  q.head_bits = r.width("head_bits");
  q.drafter_bits = r.width("drafter_bits");
  const auto preset = codec::preset_from_name(r.text("preset"));
  if (!preset) r.fail("preset", "a known preset");
  q.encode.preset = preset.value_or(codec::Preset::kFast);
  q.encode.codec = codec::quantize_preset(q.encode.preset);
  const auto codebook = codec::codebook_from_name(r.text("codebook"));
  if (!codebook) r.fail("codebook", "mul1, mcg or 3inst");
  q.encode.codec.codebook = codebook.value_or(codec::Codebook::kMul1);
  const Json* seed = r.find("seed");
  if (seed == nullptr || !seed->is_number_unsigned()) r.fail("seed", "a whole number");
  else q.encode.codec.seed = seed->get<uint64_t>();
  q.encode.damping = r.real_or_word("damping", 0, 1);
  q.encode.shared_scales = r.flag("shared_scales");
  q.encode.output_metrics = r.find("output_metrics") != nullptr && r.text("output_metrics") == "model";
  q.encode.routing_exponent = r.real("routing_exponent", 0, 4);
  q.encode.prior_w13 = r.real_or_word("prior_tokens_w13", 0, 1e9);
  q.encode.prior_w2 = r.real_or_word("prior_tokens_w2", 0, 1e9);
  q.encode.prior_sample = r.whole("prior_sample", 1, int64_t{1} << 40);
  q.encode.w2_input = r.text("w2_input") == "native" ? W2Input::kNative : W2Input::kQuantized;
  q.stream = r.find("stream") != nullptr && r.text("stream") == "native" ? StreamFrom::kNative : StreamFrom::kQuantized;
  q.draft_stride = r.whole("draft_stride", 1, int64_t{1} << 40);
  const auto numerics = numerics_from_name(r.text("numerics"));
  if (!numerics) r.fail("numerics", "full or kvq");
  q.numerics = numerics.value_or(Numerics::kKvq);
  record.rows = r.whole("rows", 0, int64_t{1} << 40);
  RETURN_IF_ERROR(top.status());
  RETURN_IF_ERROR(in.status());
  RETURN_IF_ERROR(r.status());
  const Json* encoder = r.find("encoder");
  if (encoder == nullptr) return data_loss(where + ": options: 'encoder': expected an object, found no such key");
  RETURN_IF_ERROR(read_encoder(*encoder, where + ": options: encoder", &q.encode.codec));
  return record;
}

}  // namespace espalier
