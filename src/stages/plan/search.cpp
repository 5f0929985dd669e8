#include "stages/plan/search.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace espalier {
namespace {

constexpr size_t kMaxOpenItems = 48;
constexpr int64_t kMaxNodes = 4'000'000;

struct Open {
  double cost;  // above the item's cheapest
  int option;
};

class Search {
 public:
  Search(const AllocationProblem& problem, const Hulls& hulls, const Dual::Best& dual)
      : problem_(problem), hulls_(hulls), dual_(dual) {}

  SearchResult run(const std::vector<int>& best) {
    SearchResult out;
    if (best.empty()) {
      best_objective_ = std::numeric_limits<double>::infinity();
    } else {
      best_objective_ = allocation_use(problem_, best).objective;
    }
    if (!collect()) return out;
    choice_.resize(problem_.items.size());
    for (size_t i = 0; i < choice_.size(); ++i) choice_[i] = open_[i][0].option;
    // Items that are open last: their least and the fixed ones' use are known at every depth.
    order_least_use();
    double fixed = hulls_.floor;
    for (size_t i = 0; i < open_.size(); ++i) {
      if (open_[i].size() > 1) continue;
      fixed += hulls_.weights[i] * problem_.items[i].options[static_cast<size_t>(open_[i][0].option)].error;
    }
    out.is_complete = descend(0, 0, fixed, 0, 0);
    out.nodes = nodes_;
    out.found = !found_.empty();
    out.choice = found_;
    return out;
  }

 private:
  double reduced_cost(size_t item, const AllocationOption& o) const {
    double weight = hulls_.weights[item];
    for (size_t g = 0; g < hulls_.guards.size(); ++g) weight += dual_.prices.guards[g] * hulls_.guard_weight(g, item);
    const double price = dual_.prices.storage + dual_.prices.reads * static_cast<double>(problem_.items[item].reads);
    return weight * o.error + price * static_cast<double>(o.half_bits);
  }

  // Options that can be part of a better choice; false when too many items have several.
  bool collect() {
    const double room = best_objective_ - dual_.value;
    const double slack = 1e-12 * std::abs(dual_.value);
    open_.resize(problem_.items.size());
    for (size_t i = 0; i < open_.size(); ++i) {
      const std::vector<AllocationOption>& options = problem_.items[i].options;
      for (size_t k = 0; k < options.size(); ++k)
        open_[i].push_back({reduced_cost(i, options[k]), static_cast<int>(k)});
      std::stable_sort(open_[i].begin(), open_[i].end(), [](const Open& a, const Open& b) { return a.cost < b.cost; });
      const double least = open_[i][0].cost;
      for (Open& o : open_[i]) o.cost -= least;
      while (open_[i].size() > 1 && open_[i].back().cost > room + slack) open_[i].pop_back();
      if (open_[i].size() > 1) items_.push_back(i);
      if (items_.size() > kMaxOpenItems) return false;
    }
    // Wide spreads first prune early.
    std::stable_sort(items_.begin(), items_.end(),
                     [&](size_t a, size_t b) { return open_[a].back().cost > open_[b].back().cost; });
    return true;
  }

  void order_least_use() {
    least_bits_.assign(items_.size() + 1, 0);
    least_reads_.assign(items_.size() + 1, 0);
    for (size_t i = 0; i < open_.size(); ++i) {
      if (open_[i].size() == 1) {
        const int64_t size = problem_.items[i].options[static_cast<size_t>(open_[i][0].option)].half_bits;
        least_bits_.back() += size;
        least_reads_.back() += static_cast<ReadBits>(problem_.items[i].reads) * size;
      }
    }
    for (size_t depth = items_.size(); depth-- > 0;) {
      const size_t i = items_[depth];
      int64_t least = std::numeric_limits<int64_t>::max();
      for (const Open& o : open_[i]) {
        least = std::min(least, problem_.items[i].options[static_cast<size_t>(o.option)].half_bits);
      }
      least_bits_[depth] = least_bits_[depth + 1] + least;
      least_reads_[depth] = least_reads_[depth + 1] + static_cast<ReadBits>(problem_.items[i].reads) * least;
    }
  }

  // False when the nodes are used up.
  bool descend(size_t depth, double cost, double objective, int64_t bits, ReadBits reads) {
    if (++nodes_ > kMaxNodes) return false;
    if (dual_.value + cost > best_objective_) return true;
    if (bits + least_bits_[depth] > problem_.storage_limit) return true;
    if (problem_.read_limit && reads + least_reads_[depth] > *problem_.read_limit) return true;
    if (depth == items_.size()) {
      if (objective > best_objective_ + 1e-12 * std::abs(best_objective_)) return true;
      nodes_ += static_cast<int64_t>(choice_.size() / 16);  // what summing all items costs, in nodes
      const AllocationUse use = allocation_use(problem_, choice_);
      if (use.objective < best_objective_ && is_within_limits(problem_, use)) {
        best_objective_ = use.objective;
        found_ = choice_;
      }
      return true;
    }
    const size_t i = items_[depth];
    for (const Open& o : open_[i]) {
      choice_[i] = o.option;
      const AllocationOption& option = problem_.items[i].options[static_cast<size_t>(o.option)];
      if (!descend(depth + 1, cost + o.cost, objective + hulls_.weights[i] * option.error, bits + option.half_bits,
                   reads + static_cast<ReadBits>(problem_.items[i].reads) * option.half_bits)) {
        return false;
      }
    }
    return true;
  }

  const AllocationProblem& problem_;
  const Hulls& hulls_;
  const Dual::Best& dual_;
  std::vector<std::vector<Open>> open_;  // per item, by cost
  std::vector<size_t> items_;            // with more than one option left
  std::vector<int64_t> least_bits_;      // from a depth on, fixed items included
  std::vector<ReadBits> least_reads_;
  std::vector<int> choice_, found_;
  double best_objective_ = 0;
  int64_t nodes_ = 0;
};

}  // namespace

SearchResult search_exactly(const AllocationProblem& problem, const Hulls& hulls, const Dual::Best& dual,
                            const std::vector<int>& best) {
  return Search(problem, hulls, dual).run(best);
}

}  // namespace espalier
