#include "stages/plan/plan_inputs.h"

#include <charconv>
#include <utility>

namespace espalier {
namespace {

constexpr std::pair<PlanRule, std::string_view> kRules[] = {{PlanRule::kMeasured, "measured"},
                                                            {PlanRule::kUniform, "uniform"},
                                                            {PlanRule::kEndsFirst, "ends-first"},
                                                            {PlanRule::kFrequency, "frequency"},
                                                            {PlanRule::kLayer, "layer"}};
constexpr const char* kMatrixNames[] = {"w1", "w3", "w2"};

// "3", "3-5" or "*" below `count`.
bool parse_range(std::string_view text, int64_t count, int& first, int& last) {
  if (text == "*") {
    first = last = -1;
    return true;
  }
  const auto number = [](std::string_view part, int& out) {
    const auto [end, code] = std::from_chars(part.data(), part.data() + part.size(), out);
    return code == std::errc() && end == part.data() + part.size();
  };
  const size_t dash = text.find('-');
  if (!number(text.substr(0, dash), first)) return false;
  last = first;
  if (dash != std::string_view::npos && !number(text.substr(dash + 1), last)) return false;
  return first >= 0 && last >= first && last < count;
}

std::string range_text(const char* one, const char* many, int first, int last) {
  if (first < 0) return std::string("all ") + many;
  if (first == last) return std::string(one) + " " + std::to_string(first);
  return std::string(many) + " " + std::to_string(first) + "-" + std::to_string(last);
}

std::optional<int> k2_from_text(std::string_view text) {
  for (int k2 = 2; k2 <= 16; ++k2) {
    if (width_char(k2) != '?' && width_text_of(k2) == text) return k2;
  }
  return std::nullopt;
}

}  // namespace

std::string WidthPin::text() const {
  std::string out = range_text("layer", "layers", first_layer, last_layer);
  if (first_expert >= 0) out += " " + range_text("expert", "experts", first_expert, last_expert);
  if (matrix >= 0) out += std::string(" ") + kMatrixNames[matrix];
  if (min_k2 != 0 && min_k2 == max_k2) {
    out += " = " + width_text_of(min_k2);
  } else {
    if (min_k2 != 0) out += " >= " + width_text_of(min_k2);
    if (max_k2 != 0) out += " <= " + width_text_of(max_k2);
  }
  return reason.empty() ? out : out + " (" + reason + ")";
}

Result<WidthPin> parse_pin(std::string_view text, std::string_view bound, const Config& config) {
  const auto refuse = [&] {
    return invalid_argument("--" + std::string(bound) +
                            ": expected LAYERS[:EXPERTS[:w1|w2|w3]]=WIDTH with layers below " +
                            std::to_string(config.n_layers) + " and experts below " + std::to_string(config.n_experts) +
                            ", such as 37-39=3 or 0:0-7:w2=2.5, found '" + std::string(text) + "'");
  };
  const size_t equals = text.rfind('=');
  if (equals == std::string_view::npos) return refuse();
  const auto k2 = k2_from_text(text.substr(equals + 1));
  if (!k2) return refuse();
  std::string_view where = text.substr(0, equals);
  WidthPin pin;
  const size_t colon = where.find(':');
  if (!parse_range(where.substr(0, colon), config.n_layers, pin.first_layer, pin.last_layer)) return refuse();
  if (colon != std::string_view::npos) {
    where.remove_prefix(colon + 1);
    const size_t second = where.find(':');
    if (!parse_range(where.substr(0, second), config.n_experts, pin.first_expert, pin.last_expert)) return refuse();
    if (second != std::string_view::npos) {
      where.remove_prefix(second + 1);
      for (int m = 0; m < kExpertMatrices; ++m) {
        if (where == kMatrixNames[m]) pin.matrix = m;
      }
      if (pin.matrix < 0) return refuse();
    }
  }
  if (bound != "max") pin.min_k2 = *k2;
  if (bound != "min") pin.max_k2 = *k2;
  return pin;
}

std::string_view plan_rule_name(PlanRule rule) {
  for (const auto& [r, name] : kRules) {
    if (r == rule) return name;
  }
  return "measured";
}

std::optional<PlanRule> plan_rule_from_name(std::string_view name) {
  for (const auto& [rule, text] : kRules) {
    if (text == name) return rule;
  }
  return std::nullopt;
}

}  // namespace espalier
