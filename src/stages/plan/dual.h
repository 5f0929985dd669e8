// The Lagrangian dual of an allocation: value, minimiser and best multipliers. Internal to the solver in allocation.h.
#pragma once

#include <cstdint>
#include <vector>

#include "stages/plan/hulls.h"

namespace espalier {

// The limits that the dual works with; the problem's own, or tightened ones.
struct DualLimits {
  double storage = 0;
  bool has_reads = false;
  double reads = 0;
  std::vector<double> guards;  // of Hulls::guards, without the domains' floors: on the widths' part of K_d
};

struct DualPrices {
  double storage = 0;  // per half bit
  double reads = 0;
  std::vector<double> guards;  // of Hulls::guards
};

class Dual {
 public:
  Dual(const AllocationProblem& problem, const Hulls& hulls);

  struct Point {
    double value = 0;    // of the dual function: a lower bound of every feasible objective
    double storage = 0;  // use of the minimiser; with `limits` subtracted a supergradient
    double reads = 0;
    std::vector<double> guards;
  };
  // Minimiser of the Lagrangian; of several the one of least storage. O(points).
  Point evaluate(const DualPrices& prices, const DualLimits& limits);
  // Hull positions of that minimiser.
  std::vector<int> positions(const DualPrices& prices) const;

  struct Best {
    DualPrices prices;
    double value = 0;
    bool is_infeasible = false;  // proved: the dual passes what the worst choice costs
  };
  // Bisection over the storage price alone, and the ellipsoid method over all prices when another limit binds.
  Best maximise(const DualLimits& limits);

  int64_t n_evaluations() const { return n_evaluations_; }

 private:
  // The smallest storage price, to neighbouring doubles, whose minimiser keeps the storage limit, others as in
  // `prices`. Returns false when even the smallest options pass it.
  bool settle_storage(DualPrices& prices, const DualLimits& limits);
  void ellipsoid(const DualLimits& limits, Best& best);

  const Hulls& hulls_;
  std::vector<double> reads_;
  double worst_ = 0;  // objective of the smallest options
  int64_t n_evaluations_ = 0;
};

}  // namespace espalier
