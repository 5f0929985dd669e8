#include "model/sensitivity.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "format/json.h"

namespace espalier {
namespace {

// Nats, weights and factors beyond this are not measurements.
constexpr double kLargest = 1e12;
constexpr size_t kMaxDomains = 1000;

class Parser {
 public:
  Parser(std::string_view what, const Config& config) : what_(what), config_(config) {}

  Result<Sensitivity> parse(const Json& root) {
    if (!root.is_object()) return error("", "an object", root);
    RETURN_IF_ERROR(text(root, "", "schema", schema_));
    if (schema_ != kSensitivitySchema)
      return error("schema", std::string("'") + kSensitivitySchema + "'", root["schema"]);
    RETURN_IF_ERROR(model(root));
    RETURN_IF_ERROR(text(root, "", "method", out_.method));
    RETURN_IF_ERROR(domains(root));
    RETURN_IF_ERROR(layers(root));
    RETURN_IF_ERROR(law(root));
    if (const Json* f = find(root, "matrix_factors")) RETURN_IF_ERROR(factors(*f, "matrix_factors", out_.factors));
    if (const Json* b = find(root, "base")) RETURN_IF_ERROR(base(*b));
    for (const auto& [key, member] : {std::pair{"routing_sha256", &Sensitivity::routing_sha256},
                                      std::pair{"errors_sha256", &Sensitivity::errors_sha256},
                                      std::pair{"blocks_sha256", &Sensitivity::blocks_sha256}}) {
      if (find(root, key) != nullptr) RETURN_IF_ERROR(digest(root, "", key, out_.*member));
    }
    if (const Json* inputs = find(root, "inputs")) {
      if (!inputs->is_object()) return error("inputs", "an object of strings", *inputs);
      for (const auto& [key, value] : inputs->items()) {
        RETURN_IF_ERROR(text(*inputs, "inputs.", key.c_str(), out_.inputs[key]));
      }
    }
    return std::move(out_);
  }

 private:
  Status error(const std::string& where, const std::string& expected, const Json& found) const {
    std::string shown = dump_json(found);
    if (shown.size() > 60) shown = shown.substr(0, 57) + "...";
    return data_loss(what_ + (where.empty() ? "" : ": '" + where + "'") + ": expected " + expected + ", found " +
                     shown);
  }
  Status missing(const std::string& key) const { return data_loss(what_ + ": '" + key + "' is missing"); }

  static const Json* find(const Json& object, const char* key) {
    const auto it = object.find(key);
    return it == object.end() || it->is_null() ? nullptr : &*it;
  }

  Status text(const Json& object, const std::string& prefix, const char* key, std::string& out) const {
    const Json* v = find(object, key);
    if (v == nullptr) return missing(prefix + key);
    if (!v->is_string()) return error(prefix + key, "a string", *v);
    out = v->get<std::string>();
    return ok_status();
  }

  Status digest(const Json& object, const std::string& prefix, const char* key, std::string& out) const {
    RETURN_IF_ERROR(text(object, prefix, key, out));
    const bool is_hex = out.size() == 64 && out.find_first_not_of("0123456789abcdef") == std::string::npos;
    return is_hex ? ok_status() : error(prefix + key, "64 lower-case hex digits", *find(object, key));
  }

  // `fallback` stands for a missing key; without one it must be there.
  Status real(const Json& object, const std::string& prefix, const char* key, double low, double high,
              std::optional<double> fallback, double& out) const {
    const Json* v = find(object, key);
    if (v == nullptr) {
      if (!fallback) return missing(prefix + key);
      out = *fallback;
      return ok_status();
    }
    return in_range(*v, prefix + key, low, high, out);
  }

  Status in_range(const Json& v, const std::string& where, double low, double high, double& out) const {
    if (!v.is_number() || !(v.get<double>() >= low && v.get<double>() <= high)) {
      char range[64];
      std::snprintf(range, sizeof range, "a number in [%g, %g]", low, high);
      return error(where, range, v);
    }
    out = v.get<double>();
    return ok_status();
  }

  Status count(const Json& object, const std::string& prefix, const char* key, int64_t& out) const {
    const Json* v = find(object, key);
    if (v == nullptr) return ok_status();
    if (!v->is_number_unsigned() || v->get<uint64_t>() > (uint64_t{1} << 53)) {
      return error(prefix + key, "a whole number >= 0", *v);
    }
    out = v->get<int64_t>();
    return ok_status();
  }

  // A list of one number per domain; empty when it is not required and not there.
  Status per_domain(const Json& object, const std::string& prefix, const char* key, bool is_required,
                    std::vector<double>& out) const {
    const Json* v = find(object, key);
    if (v == nullptr) return is_required ? missing(prefix + key) : ok_status();
    const size_t n = out_.domains.size();
    if (!v->is_array() || v->size() != n) {
      return error(prefix + key, "a list of " + std::to_string(n) + " numbers, one per domain", *v);
    }
    out.resize(n);
    for (size_t d = 0; d < n; ++d) {
      RETURN_IF_ERROR(in_range((*v)[d], prefix + key + "." + std::to_string(d), 0, kLargest, out[d]));
    }
    return ok_status();
  }

  Status model(const Json& root) {
    const Json* m = find(root, "model");
    if (m == nullptr || !m->is_object()) return missing("model");
    for (const auto& [key, expected] : {std::pair<const char*, int64_t>{"layers", config_.n_layers},
                                        std::pair<const char*, int64_t>{"experts", config_.n_experts}}) {
      int64_t found = -1;
      if (find(*m, key) == nullptr) return missing(std::string("model.") + key);
      RETURN_IF_ERROR(count(*m, "model.", key, found));
      if (found != expected) {
        return error(std::string("model.") + key, std::to_string(expected) + " as in the checkpoint's config",
                     (*m)[key]);
      }
    }
    if (find(*m, "identity") != nullptr) RETURN_IF_ERROR(text(*m, "model.", "identity", out_.model_identity));
    return ok_status();
  }

  Status domains(const Json& root) {
    const Json* list = find(root, "domains");
    if (list == nullptr) return missing("domains");
    if (!list->is_array() || list->empty() || list->size() > kMaxDomains) {
      return error("domains", "a list of 1 to " + std::to_string(kMaxDomains) + " domains", *list);
    }
    std::set<std::string> names;
    for (size_t d = 0; d < list->size(); ++d) {
      const std::string prefix = "domains." + std::to_string(d) + ".";
      const Json& object = (*list)[d];
      if (!object.is_object()) return error(prefix, "an object", object);
      SensitivityDomain domain;
      RETURN_IF_ERROR(text(object, prefix, "name", domain.name));
      if (domain.name.empty() || !names.insert(domain.name).second) {
        return error(prefix + "name", "a name that no other domain has", object["name"]);
      }
      RETURN_IF_ERROR(real(object, prefix, "weight", 0, kLargest, 1, domain.weight));
      RETURN_IF_ERROR(real(object, prefix, "floor", 0, kLargest, 0, domain.floor));
      RETURN_IF_ERROR(real(object, prefix, "additivity", 0, kLargest, 1, domain.additivity));
      RETURN_IF_ERROR(count(object, prefix, "positions", domain.positions));
      RETURN_IF_ERROR(count(object, prefix, "blocks", domain.blocks));
      out_.domains.push_back(std::move(domain));
    }
    double sum = 0;
    for (const SensitivityDomain& d : out_.domains) sum += d.weight;
    return sum > 0 ? ok_status() : error("domains", "at least one weight above 0", *list);
  }

  Status layers(const Json& root) {
    const Json* list = find(root, "layers");
    if (list == nullptr) return missing("layers");
    if (!list->is_array() || list->size() != static_cast<size_t>(config_.n_layers)) {
      return error("layers", "a list of " + std::to_string(config_.n_layers) + " layers", *list);
    }
    for (size_t l = 0; l < list->size(); ++l) {
      const std::string prefix = "layers." + std::to_string(l) + ".";
      const Json& object = (*list)[l];
      if (!object.is_object()) return error(prefix, "an object", object);
      LayerSensitivity layer;
      RETURN_IF_ERROR(per_domain(object, prefix, "floor", true, layer.floor));
      RETURN_IF_ERROR(per_domain(object, prefix, "slope", true, layer.slope));
      RETURN_IF_ERROR(per_domain(object, prefix, "slope_se", true, layer.slope_se));
      RETURN_IF_ERROR(per_domain(object, prefix, "noise", false, layer.noise));
      if (const Json* swaps = find(object, "swap")) {
        if (!swaps->is_object()) return error(prefix + "swap", "an object of swaps", *swaps);
        for (const auto& [name, swap] : swaps->items()) {
          const std::string where = prefix + "swap." + name + ".";
          if (!swap.is_object()) return error(where, "an object", swap);
          RETURN_IF_ERROR(per_domain(swap, where, "mean", true, layer.swaps[name].mean));
          RETURN_IF_ERROR(per_domain(swap, where, "se", true, layer.swaps[name].se));
        }
      }
      if (const Json* f = find(object, "matrix_factors")) {
        layer.factors.emplace();
        RETURN_IF_ERROR(factors(*f, prefix + "matrix_factors", *layer.factors));
      }
      out_.layers.push_back(std::move(layer));
    }
    return ok_status();
  }

  Status factors(const Json& object, const std::string& where, MatrixFactors& out) const {
    if (!object.is_object()) return error(where, "an object with w1, w3 and w2", object);
    RETURN_IF_ERROR(real(object, where + ".", "w1", 0, kLargest, std::nullopt, out.w1));
    RETURN_IF_ERROR(real(object, where + ".", "w3", 0, kLargest, std::nullopt, out.w3));
    RETURN_IF_ERROR(real(object, where + ".", "w2", 0, kLargest, std::nullopt, out.w2));
    return out.sum() > 0 ? ok_status() : error(where, "at least one factor above 0", object);
  }

  Status law(const Json& root) {
    const Json* a = find(root, "amplitude");
    if (a == nullptr) return ok_status();
    if (!a->is_object()) return error("amplitude", "an object", *a);
    RETURN_IF_ERROR(real(*a, "amplitude.", "error_at_2", 1e-6, 1e3, std::nullopt, out_.law.error_at_2));
    RETURN_IF_ERROR(real(*a, "amplitude.", "ratio", 1, 1e3, std::nullopt, out_.law.ratio));
    return real(*a, "amplitude.", "exponent", 1e-3, 16, std::nullopt, out_.law.exponent);
  }

  Status base(const Json& object) {
    if (!object.is_object()) return error("base", "an object", object);
    out_.base.emplace();
    RETURN_IF_ERROR(digest(object, "base.", "plan_sha256", out_.base->plan_sha256));
    return per_domain(object, "base.", "kl", true, out_.base->kl);
  }

  std::string what_;
  const Config& config_;
  std::string schema_;
  Sensitivity out_;
};

Json factors_json(const MatrixFactors& f) {
  return {{"w1", f.w1}, {"w3", f.w3}, {"w2", f.w2}};
}

}  // namespace

double AmplitudeLaw::error(double bits) const {
  return std::pow(error_at_2 * std::pow(ratio, 2 - bits), exponent);
}

Result<Sensitivity> parse_sensitivity(std::string_view json_text, std::string_view what, const Config& config) {
  ASSIGN_OR_RETURN(const Json root, parse_json(json_text, what));
  return Parser(what, config).parse(root);
}

std::string sensitivity_json(const Sensitivity& table, const Config& config) {
  Json doc;
  doc["schema"] = kSensitivitySchema;
  doc["model"] = {{"layers", config.n_layers}, {"experts", config.n_experts}};
  if (!table.model_identity.empty()) doc["model"]["identity"] = table.model_identity;
  doc["method"] = table.method;
  doc["domains"] = Json::array();
  for (const SensitivityDomain& d : table.domains) {
    doc["domains"].push_back({{"name", d.name},
                              {"weight", d.weight},
                              {"positions", d.positions},
                              {"blocks", d.blocks},
                              {"floor", d.floor},
                              {"additivity", d.additivity}});
  }
  doc["layers"] = Json::array();
  for (const LayerSensitivity& layer : table.layers) {
    Json entry = {{"floor", layer.floor}, {"slope", layer.slope}, {"slope_se", layer.slope_se}};
    if (!layer.noise.empty()) entry["noise"] = layer.noise;
    for (const auto& [name, swap] : layer.swaps) entry["swap"][name] = {{"mean", swap.mean}, {"se", swap.se}};
    if (layer.factors) entry["matrix_factors"] = factors_json(*layer.factors);
    doc["layers"].push_back(std::move(entry));
  }
  doc["amplitude"] = {
      {"error_at_2", table.law.error_at_2}, {"ratio", table.law.ratio}, {"exponent", table.law.exponent}};
  doc["matrix_factors"] = factors_json(table.factors);
  if (table.base) doc["base"] = {{"plan_sha256", table.base->plan_sha256}, {"kl", table.base->kl}};
  if (!table.routing_sha256.empty()) doc["routing_sha256"] = table.routing_sha256;
  if (!table.errors_sha256.empty()) doc["errors_sha256"] = table.errors_sha256;
  if (!table.blocks_sha256.empty()) doc["blocks_sha256"] = table.blocks_sha256;
  doc["inputs"] = Json::object();
  for (const auto& [key, value] : table.inputs) doc["inputs"][key] = value;
  return dump_json(doc, 1) + "\n";
}

}  // namespace espalier
