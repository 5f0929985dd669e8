// Lower convex hulls of every item's (storage, error) points: the only options that a Lagrangian can choose, in one
// flat table. Internal to the solver in allocation.h.
#pragma once

#include <cstdint>
#include <vector>

#include "stages/plan/allocation.h"

namespace espalier {

struct HullPoint {
  int64_t half_bits = 0;
  double error = 0;
  double slope = 0;  // error saved per half bit by the step to the next point; 0 at the last
  int option = 0;    // index into the item's options
};

struct Hulls {
  std::vector<HullPoint> points;      // per item ascending in storage, strictly falling in error, slopes not rising
  std::vector<size_t> first;          // [n_items + 1] offsets into points
  std::vector<double> weights;        // [n_items] objective per unit of error: sum_d weight_d additivity_d slope_{i,d}
  std::vector<int> guards;            // domains that have a limit
  std::vector<double> guard_weights;  // [n_guards, n_items] additivity_d slope_{i,d}
  double floor = 0;                   // sum_d weight_d floor_d

  size_t n_items() const { return weights.size(); }
  size_t n_points(size_t item) const { return first[item + 1] - first[item]; }
  const HullPoint& at(size_t item, size_t position) const { return points[first[item] + position]; }
  double guard_weight(size_t guard, size_t item) const { return guard_weights[guard * n_items() + item]; }
};

// The hull of one item's options. Among options of one size the first of least error stands for all; points on a
// straight line stay.
void append_lower_hull(const std::vector<AllocationOption>& options, std::vector<HullPoint>& out);

// Checks the problem and builds the table. Errors: invalid_argument naming the item.
Result<Hulls> make_hulls(const AllocationProblem& problem);

}  // namespace espalier
