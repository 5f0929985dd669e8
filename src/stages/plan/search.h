// Exact search over what the dual leaves open: every option whose reduced cost alone exceeds the distance between the
// best choice and the dual bound is out; the rest is enumerated depth first. Internal to the solver in allocation.h.
#pragma once

#include <cstdint>
#include <vector>

#include "stages/plan/dual.h"

namespace espalier {

struct SearchResult {
  bool is_complete = false;  // `choice` is optimal over all options, those off the hull included
  bool found = false;        // a choice better than the one given (or any, when none was given)
  std::vector<int> choice;
  int64_t nodes = 0;
};

// best: a feasible choice, or empty. Gives up without a result when more than a few items are open or after a fixed
// number of nodes.
SearchResult search_exactly(const AllocationProblem& problem, const Hulls& hulls, const Dual::Best& dual,
                            const std::vector<int>& best);

}  // namespace espalier
