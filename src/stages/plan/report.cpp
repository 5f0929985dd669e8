#include "stages/plan/report.h"

#include <algorithm>
#include <array>
#include <cstdarg>
#include <cstdio>
#include <map>
#include <numeric>

#include "stages/plan/hulls.h"

namespace espalier {
namespace {

constexpr size_t kShownExperts = 8;

__attribute__((format(printf, 2, 3))) void add(std::string& out, const char* format, ...) {
  std::array<char, 512> text;
  va_list arguments;
  va_start(arguments, format);
  const int n = std::vsnprintf(text.data(), text.size(), format, arguments);
  va_end(arguments);
  out.append(text.data(), std::min(static_cast<size_t>(std::max(n, 0)), text.size() - 1));
}

std::string text_of(const ExpertWidths& w) {
  if (w.w1 == w.w3 && w.w1 == w.w2) return width_text_of(w.w1);
  return width_text_of(w.w1) + "/" + width_text_of(w.w3) + "/" + width_text_of(w.w2);
}

// Why an expert has its width.
struct Reason {
  double importance = 0;  // objective per unit of error
  double reads = 0;
  double last_gain = 0, next_gain = 0, price = 0;  // nats per bit
  const char* decided_by = "price";
};

class Reasons {
 public:
  Reasons(const PlanRequest& request, const PlanOutcome& outcome) : request_(request), outcome_(outcome) {}

  Reason of(size_t item) const {
    const AllocationProblem& p = outcome_.problem.allocation;
    Reason out;
    const size_t n_domains = p.domains.size();
    for (size_t d = 0; d < n_domains; ++d) {
      out.importance += p.domains[d].weight * p.domains[d].additivity * p.slopes[item * n_domains + d];
    }
    out.reads = static_cast<double>(p.items[item].reads) / kReadUnits;
    out.price = 2 * (outcome_.allocation.prices.storage +
                     outcome_.allocation.prices.reads * static_cast<double>(p.items[item].reads));
    if (request_.rule != PlanRule::kMeasured) {
      out.decided_by = plan_rule_name(request_.rule).data();
      return out;
    }
    std::vector<HullPoint> hull;
    append_lower_hull(p.items[item].options, hull);
    size_t at = 0;
    while (at + 1 < hull.size() && hull[at].option != outcome_.allocation.choice[item]) ++at;
    if (at > 0) out.last_gain = 2 * out.importance * hull[at - 1].slope;
    if (at + 1 < hull.size()) out.next_gain = 2 * out.importance * hull[at].slope;
    // At the end of its options: a pin's, when one bounds this expert there.
    if (at + 1 == hull.size()) out.decided_by = is_pinned(item, &WidthPin::max_k2) ? "pin" : "widest";
    if (at == 0 && is_pinned(item, &WidthPin::min_k2)) out.decided_by = "pin";
    return out;
  }

 private:
  bool is_pinned(size_t item, int WidthPin::*bound) const {
    const PackPlan& plan = outcome_.plan;
    const auto per_layer = plan.experts.begin()->second.size();
    const int layer = static_cast<int>(item / per_layer), expert = static_cast<int>(item % per_layer);
    return std::any_of(outcome_.problem.pins.begin(), outcome_.problem.pins.end(), [&](const WidthPin& pin) {
      return pin.*bound != 0 && (pin.first_layer < 0 || (layer >= pin.first_layer && layer <= pin.last_layer)) &&
             (pin.first_expert < 0 || (expert >= pin.first_expert && expert <= pin.last_expert));
    });
  }

  const PlanRequest& request_;
  const PlanOutcome& outcome_;
};

void add_limits(std::string& out, const PlanRequest& request, const PlanOutcome& outcome) {
  const AllocationProblem& p = outcome.problem.allocation;
  const AllocationPrices& prices = outcome.allocation.prices;
  out += "limits\n";
  const double half_bits_per_bpw =
      2.0 * static_cast<double>(outcome.figures.half_bits) / (2 * outcome.figures.bpw_routed);
  add(out, "  storage   %s; 0.01 bits per weight more would save %.3g nats\n",
      prices.storage > 0 ? "binds" : "has room", 0.01 * half_bits_per_bpw * prices.storage);
  if (request.read_cap) {
    add(out, "  read cap  %s; 0.01 more would save %.3g nats\n", prices.reads > 0 ? "binds" : "has room",
        0.01 * 2 * static_cast<double>(outcome.problem.reads) * prices.reads);
  }
  for (size_t d = 0; d < p.domains.size(); ++d) {
    if (!p.domains[d].limit) continue;
    add(out, "  guard %s <= %.6g %s (predicted %.6g)\n", p.domains[d].name.c_str(), *p.domains[d].limit,
        prices.guards[d] > 0 ? "binds" : "has room", outcome.figures.kl[d]);
  }
}

void add_layers(std::string& out, const PlanInputs& inputs, const PlanOutcome& outcome, const Reasons& reasons) {
  out += "widths by layer (matrices)\n";
  std::map<int, int64_t> all;
  for (int layer = 0; layer < inputs.config.n_layers; ++layer) {
    for (const ExpertWidths& w : outcome.plan.experts.at(layer)) {
      for (const int k2 : {w.w1, w.w3, w.w2}) ++all[k2];
    }
  }
  add(out, "  %5s %6s %11s", "layer", "mean", "importance");
  for (const auto& [k2, n] : all) add(out, " %7s", width_text_of(k2).c_str());
  out += "\n";
  size_t item = 0;
  for (int layer = 0; layer < inputs.config.n_layers; ++layer) {
    std::map<int, int64_t> counts;
    double bits = 0, importance = 0;
    const std::vector<ExpertWidths>& experts = outcome.plan.experts.at(layer);
    for (const ExpertWidths& w : experts) {
      for (const int k2 : {w.w1, w.w3, w.w2}) {
        ++counts[k2];
        bits += k2 == kNativeWidth ? 4.25 : k2 / 2.0;
      }
      importance += reasons.of(item++).importance;
    }
    add(out, "  %5d %6.3f %11.4g", layer, bits / static_cast<double>(3 * experts.size()), importance);
    for (const auto& [k2, n] : all) add(out, " %7lld", static_cast<long long>(counts[k2]));
    out += "\n";
  }
  add(out, "  %5s %6s %11s", "all", "", "");
  for (const auto& [k2, n] : all) add(out, " %7lld", static_cast<long long>(n));
  out += "\n";
}

void add_experts(std::string& out, const PlanInputs& inputs, const PlanOutcome& outcome, const Reasons& reasons) {
  const size_t n = outcome.problem.allocation.items.size();
  std::vector<std::pair<double, size_t>> order;
  for (size_t i = 0; i < n; ++i) order.push_back({-reasons.of(i).importance, i});
  std::sort(order.begin(), order.end());
  out += "who got what (nats per bit: saved by the last step, next step, price of a bit)\n";
  const auto line = [&](size_t item) {
    const auto per_layer = static_cast<size_t>(inputs.config.n_experts);
    const Reason r = reasons.of(item);
    add(out, "  layer %3zu expert %3zu  %-8s importance %9.3g reads %7.4f   %9.3g %9.3g %9.3g  %s\n", item / per_layer,
        item % per_layer,
        text_of(outcome.plan.experts.at(static_cast<int>(item / per_layer))[item % per_layer]).c_str(), r.importance,
        r.reads, r.last_gain, r.next_gain, r.price, r.decided_by);
  };
  const size_t head = std::min(kShownExperts, n), tail = std::min(kShownExperts, n - head);
  for (size_t k = 0; k < head; ++k) line(order[k].second);
  if (head + tail < n) add(out, "  … %zu between\n", n - head - tail);
  for (size_t k = n - tail; k < n; ++k) line(order[k].second);
}

}  // namespace

std::string plan_report_text(const PlanInputs& inputs, const PlanRequest& request, const PlanOutcome& outcome) {
  const PlanFigures& f = outcome.figures;
  const Reasons reasons(request, outcome);
  std::string out;
  add(out, "plan (%s): predicted KL %.6g nats, no plan below %.6g (gap %.2e%s)\n", plan_rule_name(request.rule).data(),
      f.predicted_kl, f.bound, f.gap,
      outcome.allocation.is_proved_optimal && request.rule == PlanRule::kMeasured ? ", proved optimal" : "");
  add(out, "bits per weight: %.4f routed stored, %.4f read per token", f.bpw_routed, f.bpw_read);
  if (f.bpw_card) add(out, ", %.4f on the card's definition", *f.bpw_card);
  add(out, " (budget %.4f %s", request.bpw, request.budget_of == BudgetOf::kCard ? "card" : "routed");
  if (request.read_cap) add(out, ", read cap %.4f", *request.read_cap);
  out += ")\n";
  add_limits(out, request, outcome);
  out += "predicted KL by domain\n";
  for (size_t d = 0; d < f.kl.size(); ++d) {
    const AllocationDomain& domain = outcome.problem.allocation.domains[d];
    add(out, "  %-20s %10.6f   weight %.3f, floor %.3g, additivity %.3f\n", domain.name.c_str(), f.kl[d], domain.weight,
        domain.floor, domain.additivity);
  }
  if (!outcome.rules.empty()) out += "simple rules at the same storage (predicted)\n";
  for (const auto& [rule, g] : outcome.rules) {
    add(out, "  %-12s KL %10.6f  %5.2fx this plan's, read %.4f bits\n", plan_rule_name(rule).data(), g.predicted_kl,
        f.predicted_kl > 0 ? g.predicted_kl / f.predicted_kl : 0, g.bpw_read);
  }
  add_layers(out, inputs, outcome, reasons);
  add_experts(out, inputs, outcome, reasons);
  size_t n_super = 0;
  for (const WidthPin& pin : outcome.problem.pins) n_super += pin.reason.starts_with("super expert");
  out += "pins\n";
  for (const WidthPin& pin : request.pins) out += "  " + pin.text() + "\n";
  add(out, "  %zu super experts (a share of %.2f or more in a domain of weight 0.5 or more)\n", n_super,
      request.super_share);
  const char* counted =
      f.dense_bytes ? "routed experts, dense matrices and head" : "routed experts; dense widths are not said";
  add(out, "bytes (%s)\n  routed %.3f MB", counted, f.routed_bytes / 1e6);
  if (f.dense_bytes) add(out, ", dense %.3f MB", *f.dense_bytes / 1e6);
  for (const auto& [ranks, bytes] : f.rank_bytes) add(out, "; first of %d: %.3f MB", ranks, bytes / 1e6);
  out += "\nceiling from weight reads at batch one\n";
  for (const SpeedCeiling& c : f.ceilings) {
    add(out, "  %d x %-5s %12.3f MB per token and rank, %10.1f tokens/s\n", c.ranks, c.machine.c_str(),
        c.bytes_per_token / 1e6, c.tokens_per_second);
  }
  return out;
}

std::string plan_experts_csv(const PlanInputs& inputs, const PlanRequest& request, const PlanOutcome& outcome) {
  const Reasons reasons(request, outcome);
  std::string out =
      "layer,expert,w1,w3,w2,importance,reads,last_gain_per_bit,next_gain_per_bit,price_per_bit,decided_by\n";
  size_t item = 0;
  for (int layer = 0; layer < inputs.config.n_layers; ++layer) {
    const std::vector<ExpertWidths>& experts = outcome.plan.experts.at(layer);
    for (size_t e = 0; e < experts.size(); ++e) {
      const Reason r = reasons.of(item++);
      add(out, "%d,%zu,%s,%s,%s,%.9g,%.9g,%.9g,%.9g,%.9g,%s\n", layer, e, width_text_of(experts[e].w1).c_str(),
          width_text_of(experts[e].w3).c_str(), width_text_of(experts[e].w2).c_str(), r.importance, r.reads,
          r.last_gain, r.next_gain, r.price, r.decided_by);
    }
  }
  return out;
}

}  // namespace espalier
