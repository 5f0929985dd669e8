#include "bench/exl3_ablation/variants.h"

#include <cstdlib>
#include <map>
#include <utility>

#include "codec/weight_scales.h"

namespace espalier::ablation {
namespace {

using codec::QuantizeOptions;

// Everything but what says which matrix it is, and its damping, which the sample decides.
void apply_preset(codec::Preset preset, QuantizeOptions& o) {
  QuantizeOptions chosen = codec::quantize_preset(preset);
  chosen.k2 = o.k2;
  chosen.codebook = o.codebook;
  chosen.seed = o.seed;
  chosen.name = o.name;
  chosen.damping = o.damping;
  o = chosen;
}

std::function<void(QuantizeOptions&)> rows(double weight, double hessian) {
  return [weight, hessian](QuantizeOptions& o) {
    o.scale_rule.row_weight = weight;
    o.scale_rule.row_hessian = hessian;
  };
}

std::function<void(QuantizeOptions&)> columns(double weight) {
  return [weight](QuantizeOptions& o) { o.scale_rule.column_weight = weight; };
}

template <typename T>
std::function<void(QuantizeOptions&)> set(T QuantizeOptions::*field, T value) {
  return [field, value](QuantizeOptions& o) { o.*field = value; };
}

std::function<void(QuantizeOptions&)> spread(double factor) {
  return [factor](QuantizeOptions& o) { o.spread = factor * codec::best_spread(o.codebook, o.k2); };
}

std::function<void(QuantizeOptions&)> damping_times(double factor) {
  return [factor](QuantizeOptions& o) { o.damping *= factor; };
}

}  // namespace

std::vector<Variant> standard_variants() {
  return {
      {"defaults", [](QuantizeOptions&) {}},
      {"preset fast", [](QuantizeOptions& o) { apply_preset(codec::Preset::kFast, o); }},
      {"preset best", [](QuantizeOptions& o) { apply_preset(codec::Preset::kBest, o); }},
      {"rows 1/2, Hessian 1/4", rows(0.5, 0.25)},
      {"rows 5/8, Hessian 3/16", rows(0.625, 0.1875)},
      {"rows 1, Hessian 0", rows(1, 0)},
      {"columns 1/2", columns(0.5)},
      {"columns 1", columns(1)},
      {"blocks not normalised", [](QuantizeOptions& o) { o.scale_rule.normalise_blocks = false; }},
      {"one-sided", set(&QuantizeOptions::two_sided, false)},
      {"descent 1", set(&QuantizeOptions::descent_sweeps, 1)},
      {"descent 2", set(&QuantizeOptions::descent_sweeps, 2)},
      {"refit 0", set(&QuantizeOptions::refit_rounds, 0)},
      {"refit 2", set(&QuantizeOptions::refit_rounds, 2)},
      {"draws 2", set(&QuantizeOptions::n_draws, 2)},
      {"draws 4", set(&QuantizeOptions::n_draws, 4)},
      {"draws 8", set(&QuantizeOptions::n_draws, 8)},
      {"cuts 2", set(&QuantizeOptions::n_cuts, 2)},
      {"cuts 4", set(&QuantizeOptions::n_cuts, 4)},
      {"spread x0.97", spread(0.97)},
      {"spread x1.03", spread(1.03)},
      {"spread searched, 16 tiles", set(&QuantizeOptions::spread_tiles, 16)},
      {"damping x1/4", damping_times(0.25)},
      {"damping x1/2", damping_times(0.5)},
      {"damping x2", damping_times(2)},
      {"damping x4", damping_times(4)},
      {"damping 0.025", set(&QuantizeOptions::damping, 0.025)},
      {"w1 and w3 share input scales", [](QuantizeOptions&) {}, true},
  };
}

Result<Variant> parse_variant(const std::string& text) {
  using Setter = void (*)(QuantizeOptions&, double);
  static const std::map<std::string, Setter> kSetters = {
      {"damping", [](QuantizeOptions& o, double v) { o.damping = v; }},
      {"descent", [](QuantizeOptions& o, double v) { o.descent_sweeps = static_cast<int>(v); }},
      {"refit", [](QuantizeOptions& o, double v) { o.refit_rounds = static_cast<int>(v); }},
      {"cuts", [](QuantizeOptions& o, double v) { o.n_cuts = static_cast<int>(v); }},
      {"draws", [](QuantizeOptions& o, double v) { o.n_draws = static_cast<int>(v); }},
      {"two", [](QuantizeOptions& o, double v) { o.two_sided = v != 0; }},
      {"tiles", [](QuantizeOptions& o, double v) { o.spread_tiles = static_cast<int>(v); }},
      {"blocks", [](QuantizeOptions& o, double v) { o.scale_rule.normalise_blocks = v != 0; }},
      {"spread", [](QuantizeOptions& o, double v) { o.spread = v * codec::best_spread(o.codebook, o.k2); }},
      {"a", [](QuantizeOptions& o, double v) { o.scale_rule.row_weight = v; }},
      {"b", [](QuantizeOptions& o, double v) { o.scale_rule.row_hessian = v; }},
      {"c", [](QuantizeOptions& o, double v) { o.scale_rule.column_weight = v; }},
  };
  std::vector<std::function<void(QuantizeOptions&)>> steps;
  for (size_t at = 0; at <= text.size();) {
    const std::string part = text.substr(at, text.find(',', at) - at);
    at += part.size() + 1;
    const size_t equals = part.find('=');
    const std::string key = part.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : part.substr(equals + 1);
    if (key == "preset") {
      const std::optional<codec::Preset> preset = codec::preset_from_name(value);
      if (!preset) return invalid_argument("variant '" + text + "': no preset '" + value + "'; expected fast or best");
      steps.push_back([preset](QuantizeOptions& o) { apply_preset(*preset, o); });
      continue;
    }
    const auto setter = kSetters.find(key);
    if (setter == kSetters.end()) {
      std::string known = "preset";
      for (const auto& entry : kSetters) known += ", " + entry.first;
      return invalid_argument("variant '" + text + "': no option '" + key + "'; expected one of " + known);
    }
    char* end = nullptr;
    const double number = std::strtod(value.c_str(), &end);
    if (value.empty() || *end != 0) {
      return invalid_argument("variant '" + text + "': expected a number for " + key + ", found '" + value + "'");
    }
    steps.push_back([set = setter->second, number](QuantizeOptions& o) { set(o, number); });
  }
  return Variant{text, [steps](QuantizeOptions& o) {
                   for (const auto& step : steps) step(o);
                 }};
}

}  // namespace espalier::ablation
