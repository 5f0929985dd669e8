#include "model/pack_plan.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "format/json.h"

namespace espalier {
namespace {

constexpr const char* kWidths = "12345678abcn";

std::string shorten(const Json& value) {
  std::string text = dump_json(value);
  return text.size() > 60 ? text.substr(0, 57) + "..." : text;
}

// Width given as a number of bits, 2.5 for 5 half bits.
std::optional<int> width_from_number(const Json& value) {
  if (!value.is_number()) return std::nullopt;
  const double k2 = 2 * value.get<double>();
  if (!(k2 >= 2 && k2 <= 16) || k2 != std::floor(k2)) return std::nullopt;
  return width_char(static_cast<int>(k2)) == '?' ? std::nullopt : std::optional<int>(static_cast<int>(k2));
}

// "3", "03", "L03", "layers.3", "mtp.1" -> number; -1 for anything else.
int trailing_number(const std::string& key) {
  size_t at = key.size();
  while (at > 0 && key[at - 1] >= '0' && key[at - 1] <= '9') --at;
  const std::string head = key.substr(0, at);
  if (at == key.size() || key.size() - at > 6) return -1;
  return head.empty() || head == "L" || head == "layer-" || head == "layers." || head == "mtp."
             ? std::stoi(key.substr(at))
             : -1;
}

class Parser {
  using Method = Status (Parser::*)(const Json&, const std::string&, int);

 public:
  Parser(std::string_view what, const Config& config) : what_(what), config_(config) {}

  Result<PackPlan> parse(const Json& root) {
    // A bare list or object of layers, or the wrapped form.
    if (root.is_array()) {
      RETURN_IF_ERROR(each(root, "layers", 0, config_.n_layers, &Parser::one_width_each));
      return finish();
    }
    if (!root.is_object()) return error("", "an object or a list of layers", shorten(root));
    const bool is_wrapped = root.contains("layers") || root.contains("matrices");
    if (is_wrapped) {
      // The granularity says which of the two counts for a layer that both give.
      const auto granularity = root.find("granularity");
      knows_granularity_ = granularity != root.end() && granularity->is_string();
      std::vector<std::pair<const char*, Method>> keys = {{"layers", &Parser::one_width_each},
                                                          {"matrices", &Parser::one_width_per_matrix}};
      if (knows_granularity_ && *granularity == "matrix") std::swap(keys[0], keys[1]);
      for (const auto& [key, method] : keys) {
        if (root.contains(key)) RETURN_IF_ERROR(each(root[key], key, 0, config_.n_layers, method));
      }
    } else {
      Json numbered = Json::object();
      for (const auto& [key, value] : root.items()) {
        if (trailing_number(key) >= 0 && key.rfind("mtp.", 0) != 0) {
          numbered.get_ref<Json::object_t&>().Container::emplace_back(key, value);
        }
      }
      if (numbered.empty()) return error("", "the key 'layers' or 'matrices'", "neither");
      RETURN_IF_ERROR(each(numbered, "layers", 0, config_.n_layers, &Parser::one_width_each));
    }
    if (const auto it = root.find("drafter"); it != root.end() && !it->is_null()) {
      RETURN_IF_ERROR(each(*it, "drafter", config_.n_layers, config_.drafter.n_stages, &Parser::either));
    }
    RETURN_IF_ERROR(dense(root));
    budget(root);
    return finish();
  }

 private:
  Status error(const std::string& where, const std::string& expected, const std::string& found) const {
    return data_loss(what_ + (where.empty() ? "" : ": '" + where + "'") + ": expected " + expected + ", found " + found);
  }
  Result<PackPlan> finish() { return std::move(plan_); }

  int64_t n_experts(int block) const {
    return block < config_.n_layers ? config_.n_experts : config_.drafter.n_experts;
  }

  // Calls `method` for every block of a list or object; `first` is the block of number 0.
  Status each(const Json& value, const std::string& key, int first, int count, Method method) {
    if (value.is_array()) {
      if (value.size() != static_cast<size_t>(count)) {
        return error(key, std::to_string(count) + " entries", std::to_string(value.size()));
      }
      for (size_t i = 0; i < value.size(); ++i) {
        RETURN_IF_ERROR((this->*method)(value[i], key + "." + std::to_string(i), first + static_cast<int>(i)));
      }
      return ok_status();
    }
    if (!value.is_object()) return error(key, "an object or a list", shorten(value));
    for (const auto& [name, entry] : value.items()) {
      const bool is_stage = name.rfind("mtp.", 0) == 0;
      const int number = trailing_number(name);
      const int block = is_stage ? config_.n_layers + number : first + number;
      const int limit = is_stage ? config_.drafter.n_stages : count;
      if (number < 0 || number >= limit) {
        return error(key + "." + name, "a number below " + std::to_string(limit), "'" + name + "'");
      }
      RETURN_IF_ERROR((this->*method)(entry, key + "." + name, block));
    }
    return ok_status();
  }

  Result<std::vector<int>> widths(const Json& value, const std::string& where, int block) const {
    const auto n = static_cast<size_t>(n_experts(block));
    const std::string expected = std::to_string(n) + " widths of " + kWidths;
    std::vector<int> out;
    if (value.is_string()) {
      const auto& text = value.get_ref<const std::string&>();
      if (text.size() != n) return error(where, expected, std::to_string(text.size()) + " characters");
      for (const char c : text) {
        const std::optional<int> k2 = width_from_char(c);
        if (!k2) {
          return error(where, expected, "'" + std::string(1, c) + "' for expert " + std::to_string(out.size()));
        }
        out.push_back(*k2);
      }
      return out;
    }
    if (!value.is_array() || value.size() != n) {
      return error(where, expected, value.is_array() ? std::to_string(value.size()) + " entries" : shorten(value));
    }
    for (const Json& item : value) {
      const std::optional<int> k2 = width_from_number(item);
      if (!k2) return error(where, expected, shorten(item) + " for expert " + std::to_string(out.size()));
      out.push_back(*k2);
    }
    return out;
  }

  // Whether the block is still free; an error when it is not and nothing says which entry counts.
  Result<bool> claim(const std::string& where, int block) {
    if (plan_.experts.count(block) == 0) return true;
    if (knows_granularity_) return false;
    return error(where, "each layer once", "widths for " + block_prefix(config_, block) + "ffn a second time");
  }

  Status one_width_each(const Json& value, const std::string& where, int block) {
    ASSIGN_OR_RETURN(const bool is_free, claim(where, block));
    if (!is_free) return ok_status();
    ASSIGN_OR_RETURN(const std::vector<int> k2, widths(value, where, block));
    for (const int k : k2) plan_.experts[block].push_back({k, k, k});
    return ok_status();
  }

  Status one_width_per_matrix(const Json& value, const std::string& where, int block) {
    ASSIGN_OR_RETURN(const bool is_free, claim(where, block));
    if (!is_free) return ok_status();
    if (!value.is_object() || !value.contains("w1") || !value.contains("w2") || !value.contains("w3")) {
      return error(where, "an object with w1, w2 and w3", shorten(value));
    }
    ASSIGN_OR_RETURN(const std::vector<int> w1, widths(value["w1"], where + ".w1", block));
    ASSIGN_OR_RETURN(const std::vector<int> w2, widths(value["w2"], where + ".w2", block));
    ASSIGN_OR_RETURN(const std::vector<int> w3, widths(value["w3"], where + ".w3", block));
    std::vector<ExpertWidths>& out = plan_.experts[block];
    for (size_t e = 0; e < w1.size(); ++e) {
      const int native = (w1[e] == kNativeWidth) + (w2[e] == kNativeWidth) + (w3[e] == kNativeWidth);
      if (native != 0 && native != 3) {
        return error(where, "all three matrices of an expert native or none",
                     std::to_string(native) + " of expert " + std::to_string(e));
      }
      out.push_back({w1[e], w3[e], w2[e]});
    }
    return ok_status();
  }

  Status either(const Json& value, const std::string& where, int block) {
    return value.is_object() ? one_width_per_matrix(value, where, block) : one_width_each(value, where, block);
  }

  Status dense(const Json& root) {
    const auto it = root.find("dense");
    if (it == root.end() || it->is_null()) return ok_status();
    if (!it->is_object()) return error("dense", "an object", shorten(*it));
    for (const auto& [name, value] : it->items()) {
      const bool is_native = value.is_string() && value.get_ref<const std::string&>() == "native";
      const std::optional<int> k2 = is_native ? std::optional<int>(kNativeWidth) : width_from_number(value);
      if (!k2) return error("dense." + name, "1 to 8, 1.5, 2.5, 3.5 or \"native\"", shorten(value));
      plan_.dense[name] = *k2;
    }
    return ok_status();
  }

  void budget(const Json& root) {
    const auto it = root.find("budget");
    if (it == root.end() || !it->is_object()) return;
    const auto number = [&](const char* key) -> std::optional<double> {
      const auto v = it->find(key);
      return v != it->end() && v->is_number() ? std::optional<double>(v->get<double>()) : std::nullopt;
    };
    plan_.storage_bpw = number("storage_bpw");
    plan_.read_bpw = number("read_bpw");
  }

  std::string what_;
  const Config& config_;
  PackPlan plan_;
  bool knows_granularity_ = false;
};

Json bits_json(int k2) {
  if (k2 == kNativeWidth) return "native";
  return k2 % 2 == 0 ? Json(k2 / 2) : Json(k2 / 2.0);
}

std::string text_of(const std::vector<ExpertWidths>& widths, int ExpertWidths::*member) {
  std::string out;
  for (const ExpertWidths& w : widths) out += width_char(w.*member);
  return out;
}

}  // namespace

char width_char(int k2) {
  if (k2 == kNativeWidth) return 'n';
  if (k2 >= 2 && k2 <= 16 && k2 % 2 == 0) return static_cast<char>('0' + k2 / 2);
  return k2 == 3 ? 'a' : k2 == 5 ? 'b' : k2 == 7 ? 'c' : '?';
}

std::optional<int> width_from_char(char c) {
  if (c >= '1' && c <= '8') return 2 * (c - '0');
  if (c >= 'a' && c <= 'c') return 3 + 2 * (c - 'a');
  return c == 'n' ? std::optional<int>(kNativeWidth) : std::nullopt;
}

std::string width_text_of(int k2) {
  if (k2 == kNativeWidth) return "native";
  return std::to_string(k2 / 2) + (k2 % 2 == 0 ? "" : ".5");
}

std::optional<int> PackPlan::width_of(const MatrixSpec& spec, int n_layers) const {
  if (spec.expert >= 0) {
    const auto it = experts.find(spec.block);
    if (it == experts.end() || static_cast<size_t>(spec.expert) >= it->second.size()) return std::nullopt;
    const ExpertWidths& w = it->second[static_cast<size_t>(spec.expert)];
    return spec.kind == MatrixKind::kExpertW1 ? w.w1 : spec.kind == MatrixKind::kExpertW3 ? w.w3 : w.w2;
  }
  const std::string part(matrix_part(spec, n_layers));
  std::vector<std::string> names = {spec.stem, module_stem(spec)};
  if (part == "drafter") {
    names.push_back("drafter_dense");
  } else {
    names.push_back(projection_name(spec));
    names.push_back(part);
  }
  for (const std::string& name : names) {
    if (const auto it = dense.find(name); it != dense.end()) return it->second;
  }
  return std::nullopt;
}

Result<PackPlan> parse_pack_plan(std::string_view json_text, std::string_view what, const Config& config) {
  ASSIGN_OR_RETURN(const Json root, parse_json(json_text, what));
  return Parser(what, config).parse(root);
}

std::string pack_plan_json(const PackPlan& plan, const Config& config) {
  Json doc;
  doc["format"] = "exl3_moe_plan";
  doc["version"] = 1;
  doc["model"] = {{"layers", config.n_layers}, {"experts", config.n_experts}};
  Json layers = Json::object(), matrices = Json::object(), drafter = Json::object();
  for (const auto& [block, widths] : plan.experts) {
    const bool is_uniform = std::all_of(widths.begin(), widths.end(),
                                        [](const ExpertWidths& w) { return w.w1 == w.w2 && w.w1 == w.w3; });
    Json entry = text_of(widths, &ExpertWidths::w1);
    if (!is_uniform) {
      entry = {{"w1", entry}, {"w2", text_of(widths, &ExpertWidths::w2)}, {"w3", text_of(widths, &ExpertWidths::w3)}};
    }
    if (block >= config.n_layers) {
      drafter["mtp." + std::to_string(block - config.n_layers)] = std::move(entry);
    } else {
      (is_uniform ? layers : matrices)[std::to_string(block)] = std::move(entry);
    }
  }
  doc["granularity"] = matrices.empty() ? "expert" : "matrix";
  doc["layers"] = std::move(layers);
  if (!matrices.empty()) doc["matrices"] = std::move(matrices);
  if (!drafter.empty()) doc["drafter"] = std::move(drafter);
  doc["dense"] = Json::object();
  for (const auto& [name, k2] : plan.dense) doc["dense"][name] = bits_json(k2);
  if (plan.storage_bpw || plan.read_bpw) {
    doc["budget"] = Json::object();
    if (plan.storage_bpw) doc["budget"]["storage_bpw"] = *plan.storage_bpw;
    if (plan.read_bpw) doc["budget"]["read_bpw"] = *plan.read_bpw;
  }
  return dump_json(doc, 1) + "\n";
}

}  // namespace espalier
