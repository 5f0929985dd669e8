#include "stages/plan/hulls.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace espalier {
namespace {

Status check_problem(const AllocationProblem& problem) {
  const size_t n_domains = problem.domains.size();
  if (n_domains == 0) return invalid_argument("allocation: expected at least one domain, found none");
  if (problem.slopes.size() != problem.items.size() * n_domains) {
    return invalid_argument("allocation: expected " + std::to_string(problem.items.size() * n_domains) +
                            " slopes, found " + std::to_string(problem.slopes.size()));
  }
  for (const AllocationDomain& d : problem.domains) {
    if (!(d.weight >= 0) || !(d.additivity >= 0) || !std::isfinite(d.weight * d.additivity) ||
        !std::isfinite(d.floor)) {
      return invalid_argument("allocation: domain '" + d.name +
                              "': expected a finite floor, weight and additivity >= 0");
    }
  }
  for (size_t i = 0; i < problem.slopes.size(); ++i) {
    if (!(problem.slopes[i] >= 0) || !std::isfinite(problem.slopes[i])) {
      return invalid_argument("allocation: item " + std::to_string(i / n_domains) +
                              ": expected finite slopes >= 0, found " + std::to_string(problem.slopes[i]));
    }
  }
  for (size_t i = 0; i < problem.items.size(); ++i) {
    const AllocationItem& item = problem.items[i];
    const std::string where = "allocation: item " + std::to_string(i) + ": ";
    if (item.options.empty()) return invalid_argument(where + "expected at least one option, found none");
    if (item.reads < 0 || item.reads >= int64_t{1} << 31) {
      return invalid_argument(where + "expected reads in [0, 2^31), found " + std::to_string(item.reads));
    }
    for (const AllocationOption& o : item.options) {
      if (o.half_bits < 0 || o.half_bits > int64_t{1} << 42 || !(o.error >= 0) || !std::isfinite(o.error)) {
        return invalid_argument(where + "expected a size in [0, 2^42] and a finite error >= 0, found " +
                                std::to_string(o.half_bits) + " and " + std::to_string(o.error));
      }
    }
  }
  return ok_status();
}

}  // namespace

void append_lower_hull(const std::vector<AllocationOption>& options, std::vector<HullPoint>& out) {
  std::vector<int> order(options.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    const AllocationOption& x = options[static_cast<size_t>(a)];
    const AllocationOption& y = options[static_cast<size_t>(b)];
    return x.half_bits != y.half_bits ? x.half_bits < y.half_bits : x.error < y.error;
  });
  const size_t begin = out.size();
  for (const int index : order) {
    const AllocationOption& o = options[static_cast<size_t>(index)];
    if (out.size() > begin && !(o.error < out.back().error)) continue;  // larger and no better
    const auto slope_from = [&](const HullPoint& p) {
      return (p.error - o.error) / static_cast<double>(o.half_bits - p.half_bits);
    };
    while (out.size() >= begin + 2 && slope_from(out.back()) > out[out.size() - 2].slope) out.pop_back();
    if (out.size() > begin) out.back().slope = slope_from(out.back());
    out.push_back({o.half_bits, o.error, 0, index});
  }
}

Result<Hulls> make_hulls(const AllocationProblem& problem) {
  RETURN_IF_ERROR(check_problem(problem));
  Hulls hulls;
  const size_t n = problem.items.size(), n_domains = problem.domains.size();
  hulls.first.reserve(n + 1);
  for (const AllocationItem& item : problem.items) {
    hulls.first.push_back(hulls.points.size());
    append_lower_hull(item.options, hulls.points);
  }
  hulls.first.push_back(hulls.points.size());
  for (size_t d = 0; d < n_domains; ++d) {
    hulls.floor += problem.domains[d].weight * problem.domains[d].floor;
    if (problem.domains[d].limit) hulls.guards.push_back(static_cast<int>(d));
  }
  hulls.weights.resize(n);
  hulls.guard_weights.resize(n * hulls.guards.size());
  for (size_t i = 0; i < n; ++i) {
    double sum = 0;
    for (size_t d = 0; d < n_domains; ++d) {
      sum += problem.domains[d].weight * problem.domains[d].additivity * problem.slopes[i * n_domains + d];
    }
    hulls.weights[i] = sum;
    for (size_t g = 0; g < hulls.guards.size(); ++g) {
      const auto d = static_cast<size_t>(hulls.guards[g]);
      hulls.guard_weights[g * n + i] = problem.domains[d].additivity * problem.slopes[i * n_domains + d];
    }
  }
  return hulls;
}

}  // namespace espalier
