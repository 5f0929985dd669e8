// From the dual's minimiser to a good feasible choice: demotions until every limit holds, promotions while one fits,
// exchanges while one pays. Works on hull positions. Internal to the solver in allocation.h.
#pragma once

#include <cstdint>
#include <vector>

#include "stages/plan/dual.h"

namespace espalier {

class Repair {
 public:
  // `read_limit` and `guards` may be tighter than the problem's. `prices` weigh the moves.
  Repair(const AllocationProblem& problem, const Hulls& hulls, const DualPrices& prices, const DualLimits& limits);

  // Errors: none; false when no single steps lead to a feasible point.
  bool run(std::vector<int>& positions);
  int64_t n_exchanges() const { return n_exchanges_; }

 private:
  // Item `item` moves from its position to `to`.
  struct Move {
    size_t item = 0;
    int to = 0;
    double objective = 0;  // change
    double cost = 0;       // change of the Lagrangian: >= 0 at the minimiser
    int64_t half_bits = 0;
    ReadBits reads = 0;
  };
  Move move(size_t item, int to) const;
  double guard_change(size_t guard, const Move& m) const;
  void apply(const Move& m);
  void set(const std::vector<int>& positions);
  // Sum of relative excesses over the limits after moves a and b (either may be null).
  double excess(const Move* a, const Move* b, const Move* c) const;
  bool fits(const Move* a, const Move* b, const Move* c) const { return excess(a, b, c) <= 0; }

  bool make_feasible();
  // The pair of one step up and one down that lowers the excess at the least cost; false when there is none.
  bool step_both_ways(double before);
  void fill();
  void exchange();
  // The cheapest steps up or down, by cost.
  std::vector<Move> cheapest(int direction, size_t count) const;

  const AllocationProblem& problem_;
  const Hulls& hulls_;
  const DualPrices& prices_;
  int64_t storage_limit_;
  int64_t smallest_step_ = 0;  // of any item, half bits
  bool has_reads_;
  ReadBits read_limit_;
  std::vector<double> guard_limits_;
  std::vector<int> positions_;
  int64_t half_bits_ = 0;
  ReadBits reads_ = 0;
  std::vector<double> guards_;
  double objective_ = 0;
  int64_t n_exchanges_ = 0;
};

}  // namespace espalier
