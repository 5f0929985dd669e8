#include "stages/plan/allocation.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "stages/plan/dual.h"
#include "stages/plan/hulls.h"
#include "stages/plan/repair.h"
#include "stages/plan/search.h"

namespace espalier {
namespace {

// The largest storage that any choice can take within the limit, as far as a common measure of the steps tells: a
// budget that no sum of steps can meet would leave the dual a gap of its own.
int64_t reachable_storage(const AllocationProblem& problem) {
  int64_t base = 0, step = 0;
  for (const AllocationItem& item : problem.items) {
    base += item.options[0].half_bits;
    for (const AllocationOption& o : item.options) step = std::gcd(step, o.half_bits - item.options[0].half_bits);
  }
  if (step <= 1) return problem.storage_limit;
  int64_t over = (problem.storage_limit - base) % step;
  if (over < 0) over += step;
  return problem.storage_limit - over;
}

DualLimits limits_of(const AllocationProblem& problem, const Hulls& hulls) {
  DualLimits out;
  out.storage = static_cast<double>(reachable_storage(problem));
  out.has_reads = problem.read_limit.has_value();
  if (out.has_reads) out.reads = static_cast<double>(*problem.read_limit);
  for (const int d : hulls.guards) {
    const AllocationDomain& domain = problem.domains[static_cast<size_t>(d)];
    out.guards.push_back(*domain.limit - domain.floor);
  }
  return out;
}

// The limits with everything but storage tightened by a share: room for a repair that cannot hit all of them at once.
DualLimits tightened(DualLimits limits, double share) {
  limits.reads *= 1 - share;
  for (double& g : limits.guards) g -= share * std::abs(g);
  return limits;
}

std::vector<int> options_at(const Hulls& hulls, const std::vector<int>& positions) {
  std::vector<int> out;
  for (size_t i = 0; i < positions.size(); ++i) out.push_back(hulls.at(i, static_cast<size_t>(positions[i])).option);
  return out;
}

// How far the best choice for domain `d` alone gets.
double least_kl(const AllocationProblem& problem, size_t d) {
  AllocationProblem alone = problem;
  for (size_t k = 0; k < alone.domains.size(); ++k) {
    alone.domains[k].limit.reset();
    alone.domains[k].weight = k == d ? 1 : 0;
  }
  const auto hulls = make_hulls(alone);
  if (!hulls.ok()) return 0;
  return Dual(alone, *hulls).maximise(limits_of(alone, *hulls)).value;
}

std::string number(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", x);
  return text;
}

Status infeasible(const AllocationProblem& problem, const Hulls& hulls, bool is_proved) {
  int64_t least_bits = 0;
  ReadBits least_reads = 0;
  for (size_t i = 0; i < problem.items.size(); ++i) {
    const int64_t size = hulls.at(i, 0).half_bits;
    least_bits += size;
    least_reads += static_cast<ReadBits>(problem.items[i].reads) * size;
  }
  if (least_bits > problem.storage_limit) {
    return failed_precondition("allocation: storage: the smallest options take " + std::to_string(least_bits) +
                               " half bits, the budget is " + std::to_string(problem.storage_limit) +
                               "; raise the budget or free pins");
  }
  if (problem.read_limit && least_reads > *problem.read_limit) {
    return failed_precondition("allocation: read cap: the smallest options already read " +
                               number(static_cast<double>(least_reads) / static_cast<double>(*problem.read_limit)) +
                               " times the cap; raise the cap or free pins");
  }
  std::string names;
  for (const int g : hulls.guards) {
    const auto d = static_cast<size_t>(g);
    const AllocationDomain& domain = problem.domains[d];
    const double least = least_kl(problem, d);
    if (least > *domain.limit) {
      return failed_precondition("allocation: guard '" + domain.name + "' = " + number(*domain.limit) +
                                 " cannot be met: within the budget its KL is at least " + number(least) +
                                 "; raise the guard or the budget");
    }
    names += (names.empty() ? "'" : ", '") + domain.name + "'";
  }
  return failed_precondition(std::string(is_proved ? "allocation: the limits cannot be met together"
                                                   : "allocation: no plan found that meets the limits together") +
                             (names.empty() ? "" : " (guards " + names + ")") + "; raise one of them or the budget");
}

}  // namespace

AllocationUse allocation_use(const AllocationProblem& problem, const std::vector<int>& choice) {
  const size_t n_domains = problem.domains.size();
  AllocationUse out;
  out.kl.assign(n_domains, 0);
  for (size_t i = 0; i < problem.items.size(); ++i) {
    const AllocationOption& o = problem.items[i].options[static_cast<size_t>(choice[i])];
    out.half_bits += o.half_bits;
    out.reads += static_cast<ReadBits>(problem.items[i].reads) * o.half_bits;
    for (size_t d = 0; d < n_domains; ++d) out.kl[d] += problem.slopes[i * n_domains + d] * o.error;
  }
  for (size_t d = 0; d < n_domains; ++d) {
    const AllocationDomain& domain = problem.domains[d];
    out.kl[d] = domain.floor + domain.additivity * out.kl[d];
    out.objective += domain.weight * out.kl[d];
  }
  return out;
}

bool is_within_limits(const AllocationProblem& problem, const AllocationUse& use) {
  if (use.half_bits > problem.storage_limit) return false;
  if (problem.read_limit && use.reads > *problem.read_limit) return false;
  for (size_t d = 0; d < problem.domains.size(); ++d) {
    if (problem.domains[d].limit && use.kl[d] > *problem.domains[d].limit) return false;
  }
  return true;
}

Result<Allocation> allocate(const AllocationProblem& problem) {
  ASSIGN_OR_RETURN(const Hulls hulls, make_hulls(problem));
  const DualLimits limits = limits_of(problem, hulls);
  Dual dual(problem, hulls);
  const Dual::Best best = dual.maximise(limits);
  if (best.is_infeasible) return infeasible(problem, hulls, true);

  Allocation out;
  for (const double share : {0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2}) {
    const DualLimits tight = tightened(limits, share);
    const Dual::Best at = share == 0 ? best : dual.maximise(tight);
    if (at.is_infeasible) break;
    std::vector<int> positions = dual.positions(at.prices);
    Repair repair(problem, hulls, at.prices, tight);
    const bool is_feasible = repair.run(positions);
    out.exchanges += repair.n_exchanges();
    if (is_feasible) {
      std::vector<int> choice = options_at(hulls, positions);
      if (is_within_limits(problem, allocation_use(problem, choice))) {
        out.choice = std::move(choice);
        break;
      }
    }
    if (!limits.has_reads && limits.guards.empty()) break;
  }
  SearchResult exact = search_exactly(problem, hulls, best, out.choice);
  out.search_nodes = exact.nodes;
  out.is_proved_optimal = exact.is_complete;
  if (exact.found) out.choice = std::move(exact.choice);
  if (out.choice.empty() && !problem.items.empty()) return infeasible(problem, hulls, exact.is_complete);

  out.use = allocation_use(problem, out.choice);
  // Rounding of two sums in different orders must not show a bound above the value.
  out.dual_bound = std::min(best.value, out.use.objective);
  out.gap = out.use.objective > 0 ? (out.use.objective - out.dual_bound) / out.use.objective : 0;
  out.prices.storage = best.prices.storage;
  out.prices.reads = best.prices.reads;
  out.prices.guards.assign(problem.domains.size(), 0);
  for (size_t g = 0; g < hulls.guards.size(); ++g)
    out.prices.guards[static_cast<size_t>(hulls.guards[g])] = best.prices.guards[g];
  out.dual_evaluations = dual.n_evaluations();
  return out;
}

Result<ReadBits> half_bits_at(double bpw, ReadBits weights) {
  if (!(bpw >= 0 && bpw <= 64))
    return invalid_argument("bits per weight: expected 0 to 64, found " + std::to_string(bpw));
  constexpr ReadBits kUnits = 1'000'000'000;
  const auto units = static_cast<ReadBits>(std::llround(bpw * 1e9));
  // weights = whole * kUnits + rest keeps the product within 128 bits for any sum of reads.
  return 2 * units * (weights / kUnits) + 2 * units * (weights % kUnits) / kUnits;
}

}  // namespace espalier
