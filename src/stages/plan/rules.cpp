#include "stages/plan/rules.h"

#include <algorithm>
#include <numeric>

#include "base/rng.h"

namespace espalier {
namespace {

// One index into `widths` per expert, layer by layer.
using Choice = std::vector<int>;

class Rules {
 public:
  Rules(const PlanInputs& inputs, const PlanRequest& request, const ExpertErrors& errors, int64_t limit)
      : inputs_(inputs), errors_(errors), limit_(limit), seed_(request.seed) {
    for (const int k2 : request.widths) {
      if (k2 != kNativeWidth) widths_.push_back(k2);
    }
    std::sort(widths_.begin(), widths_.end());
  }

  Result<PackPlan> plan(PlanRule rule) {
    if (widths_.empty() || errors_.n_experts() * size_at(0) > limit_) {
      return failed_precondition(
          "plan: the narrowest width for every expert passes the budget; raise --bpw or allow narrower widths");
    }
    switch (rule) {
      case PlanRule::kUniform:
        return from(uniform());
      case PlanRule::kEndsFirst:
        return from(ends_first());
      case PlanRule::kFrequency:
        return allocated(reads_as_importance());
      case PlanRule::kLayer:
        return allocated(layers_as_importance());
      case PlanRule::kMeasured:
        break;
    }
    return invalid_argument("plan: 'measured' is no simple rule");
  }

 private:
  int64_t size_at(int width) const {
    return kExpertMatrices * errors_.matrix_half_bits(widths_[static_cast<size_t>(width)]);
  }
  size_t n() const { return static_cast<size_t>(errors_.n_experts()); }
  size_t layer_of(size_t item) const { return item / static_cast<size_t>(inputs_.config.n_experts); }

  // The widest uniform plan that fits.
  int width_below() const {
    int at = 0;
    while (at + 1 < static_cast<int>(widths_.size()) && errors_.n_experts() * size_at(at + 1) <= limit_) ++at;
    return at;
  }

  Choice uniform() const {
    const int low = width_below();
    Choice out(n(), low);
    if (low + 1 == static_cast<int>(widths_.size())) return out;
    const int64_t n_high = (limit_ - errors_.n_experts() * size_at(low)) / (size_at(low + 1) - size_at(low));
    std::vector<size_t> order(n());
    std::iota(order.begin(), order.end(), size_t{0});
    const CounterRng rng(seed_, "uniform mix of widths");
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return rng.bits(a) < rng.bits(b); });
    for (int64_t k = 0; k < n_high; ++k) out[order[static_cast<size_t>(k)]] = low + 1;
    return out;
  }

  Choice ends_first() const {
    Choice out(n(), width_below());
    std::vector<size_t> order(n());
    std::iota(order.begin(), order.end(), size_t{0});
    const auto depth = [&](size_t item) {
      const size_t layer = layer_of(item), last = static_cast<size_t>(inputs_.config.n_layers) - 1;
      return std::min(layer, last - layer);
    };
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return depth(a) < depth(b); });
    int64_t used = errors_.n_experts() * size_at(out[0]);
    for (bool has_grown = true; has_grown;) {
      has_grown = false;
      for (const size_t item : order) {
        if (out[item] + 1 == static_cast<int>(widths_.size())) continue;
        const int64_t more = size_at(out[item] + 1) - size_at(out[item]);
        if (used + more > limit_) return out;
        used += more;
        ++out[item];
        has_grown = true;
      }
    }
    return out;
  }

  std::vector<double> reads_as_importance() const {
    std::vector<double> out;
    for (const int64_t reads : errors_.reads()) out.push_back(static_cast<double>(reads) / kReadUnits);
    return out;
  }

  std::vector<double> layers_as_importance() const {
    const size_t n_domains = errors_.domains().size(), per_layer = static_cast<size_t>(inputs_.config.n_experts);
    std::vector<double> sums(static_cast<size_t>(inputs_.config.n_layers), 0), out;
    for (size_t i = 0; i < n(); ++i) {
      for (size_t d = 0; d < n_domains; ++d) {
        const AllocationDomain& domain = errors_.domains()[d];
        sums[layer_of(i)] += domain.weight * domain.additivity * errors_.slopes()[i * n_domains + d];
      }
    }
    for (size_t i = 0; i < n(); ++i) out.push_back(sums[layer_of(i)] / static_cast<double>(per_layer));
    return out;
  }

  Result<PackPlan> allocated(std::vector<double> importance) const {
    AllocationProblem problem;
    problem.domains = {{"rule", 1, 0, 1, std::nullopt}};
    problem.slopes = std::move(importance);
    problem.storage_limit = limit_;
    AllocationItem item;
    for (size_t w = 0; w < widths_.size(); ++w) {
      item.options.push_back(
          {static_cast<int>(w), size_at(static_cast<int>(w)), inputs_.table.law.error(widths_[w] / 2.0)});
    }
    problem.items.assign(n(), item);
    ASSIGN_OR_RETURN(const Allocation found, allocate(problem));
    return from(found.choice);
  }

  PackPlan from(const Choice& choice) const {
    PackPlan out;
    for (size_t i = 0; i < choice.size(); ++i) {
      const int k2 = widths_[static_cast<size_t>(choice[i])];
      out.experts[static_cast<int>(layer_of(i))].push_back({k2, k2, k2});
    }
    return out;
  }

  const PlanInputs& inputs_;
  const ExpertErrors& errors_;
  int64_t limit_;
  uint64_t seed_;
  std::vector<int> widths_;
};

}  // namespace

Result<PackPlan> plan_by_rule(PlanRule rule, const PlanInputs& inputs, const PlanRequest& request,
                              const ExpertErrors& errors, int64_t storage_limit) {
  return Rules(inputs, request, errors, storage_limit).plan(rule);
}

}  // namespace espalier
