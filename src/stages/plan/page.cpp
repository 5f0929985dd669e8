// A plan's report as one page that needs nothing else.
#include <algorithm>
#include <array>
#include <cstdarg>
#include <cstdio>

#include "stages/plan/report.h"

namespace espalier {
namespace {

// Names come from files.
std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      default: out += c;
    }
  }
  return out;
}

__attribute__((format(printf, 1, 2))) std::string format(const char* pattern, ...) {
  std::array<char, 512> text;
  va_list arguments;
  va_start(arguments, pattern);
  const int n = std::vsnprintf(text.data(), text.size(), pattern, arguments);
  va_end(arguments);
  return {text.data(), std::min(static_cast<size_t>(std::max(n, 0)), text.size() - 1)};
}

constexpr char kStyle[] =
    "body{font:15px/1.5 system-ui,sans-serif;max-width:900px;margin:2em auto;padding:0 1em;background:#fff;color:#1f2328}"
    "h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}table{border-collapse:collapse;width:100%}"
    "th,td{padding:.25em .6em;text-align:right;border-bottom:1px solid #d1d9e0}th:first-child,td:first-child{text-align:left}"
    "td.bar{width:40%;text-align:left}td.bar i{display:block;height:.7em;background:#0969da}td.bar i.other{background:#9a6700}"
    "pre{overflow-x:auto;font-size:12px;line-height:1.35}svg{width:100%;height:auto}"
    "@media (prefers-color-scheme:dark){body{background:#0d1117;color:#f0f6fc}th,td{border-color:#3d444d}"
    "td.bar i{background:#4493f8}td.bar i.other{background:#d29922}}";

// Predicted KL of every domain, this plan above the uniform mix.
std::string domains_table(const PlanOutcome& outcome) {
  const std::vector<double>& kl = outcome.figures.kl;
  const auto uniform = outcome.rules.find(PlanRule::kUniform);
  const std::vector<double>* other = uniform == outcome.rules.end() ? nullptr : &uniform->second.kl;
  double most = *std::max_element(kl.begin(), kl.end());
  if (other != nullptr) most = std::max(most, *std::max_element(other->begin(), other->end()));
  const auto bar = [&](const char* kind, double x) {
    return format("<i class=\"%s\" style=\"width:%.1f%%\"></i>", kind, most > 0 ? 100 * x / most : 0);
  };
  std::string out = "<table><tr><th>domain</th><th>this plan</th><th>uniform mix</th><th></th></tr>\n";
  for (size_t d = 0; d < kl.size(); ++d) {
    out += "<tr><td>" + escaped(outcome.problem.allocation.domains[d].name) + "</td>" + format("<td>%.6f</td>", kl[d]);
    out += other != nullptr ? format("<td>%.6f</td>", (*other)[d]) : "<td></td>";
    out += "<td class=\"bar\">" + bar("plan", kl[d]) + (other != nullptr ? bar("other", (*other)[d]) : "") + "</td></tr>\n";
  }
  return out + "</table>\n";
}

std::string ceilings_table(const PlanOutcome& outcome) {
  std::string out = "<table><tr><th>machines</th><th>MB per token and rank</th><th>tokens/s at most</th></tr>\n";
  for (const SpeedCeiling& c : outcome.figures.ceilings) {
    out += format("<tr><td>%d x %s</td><td>%.3f</td><td>%.1f</td></tr>\n", c.ranks, c.machine.c_str(), c.bytes_per_token / 1e6,
                  c.tokens_per_second);
  }
  return out + "</table>\n";
}

}  // namespace

std::string plan_report_html(const PlanInputs& inputs, const PlanRequest& request, const PlanOutcome& outcome,
                             const std::vector<BudgetPoint>& curve, const BudgetPoint& chosen) {
  const int n_layers = inputs.config.n_layers;
  const PlanFigures& f = outcome.figures;
  std::string out =
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">"
      "<title>Plan of widths</title><style>";
  out += kStyle;
  out += "</style></head><body>\n<h1>Plan of widths</h1>\n<p>";
  out += format("Rule %s: %.4f bits per weight stored, %.4f read per token; predicted KL %.6g nats, no plan predicts less than %.6g.",
                std::string(plan_rule_name(request.rule)).c_str(), f.bpw_routed, f.bpw_read, f.predicted_kl, f.bound);
  out += "</p>\n<h2>Predicted KL by domain, in nats</h2>\n" + domains_table(outcome);
  out += "<h2>Where the bits go</h2>\n" + widths_by_layer_svg(outcome.plan, n_layers) + widths_svg(outcome.plan, n_layers);
  out += "<h2>What another budget would give</h2>\n" + budget_curve_svg(curve, chosen);
  out += "<h2>Ceiling from weight reads at batch one</h2>\n" + ceilings_table(outcome);
  out += "<h2>Who got what and why</h2>\n<pre>" + escaped(plan_report_text(inputs, request, outcome)) + "</pre>\n</body></html>\n";
  return out;
}

}  // namespace espalier
