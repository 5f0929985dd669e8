// The allocation problem and its solver: one option for every item, at the least predicted KL, under a storage budget,
// a cap on what decoding reads and limits per domain.
//
//     minimise    sum_d weight_d K_d            K_d = floor_d + additivity_d * sum_i slope_{i,d} * error_i(option_i)
//     subject to  sum_i half_bits_i             <= storage_limit
//                 sum_i reads_i * half_bits_i   <= read_limit            (optional)
//                 K_d                           <= limit_d               (domains that have one)
//
// An item is what gets one decision: an expert, or a matrix. Pins are options that are not offered. The solver
// maximises the Lagrangian dual, repairs its primal point to a feasible one, improves it by exchanges, and says how far
// from the optimum it can be at most. Storage and reads are integers, so that a budget is never passed by one bit. No
// randomness, one thread, the same result everywhere. Source: quality.md 3.1 and 3.2; Everett 1963 for the multipliers,
// Gruenwald's minimum-volume ellipsoids with deep cuts for several of them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"

namespace espalier {

// Sums of reads times half bits.
__extension__ typedef __int128 ReadBits;

struct AllocationOption {
  int label = 0;          // the caller's; the solver only hands it back
  int64_t half_bits = 0;  // storage, >= 0
  double error = 0;       // finite, >= 0
};

struct AllocationItem {
  std::vector<AllocationOption> options;  // at least one, in any order
  int64_t reads = 0;  // expected reads per token in fixed point, >= 0 and below 2^31; one scale for all items
};

struct AllocationDomain {
  std::string name;
  double weight = 1;      // >= 0
  double floor = 0;       // part of K_d that no width changes
  double additivity = 1;  // >= 0
  std::optional<double> limit;
};

struct AllocationProblem {
  std::vector<AllocationItem> items;
  std::vector<AllocationDomain> domains;  // at least one
  std::vector<double> slopes;             // [n_items, n_domains], finite, >= 0
  int64_t storage_limit = 0;              // half bits
  std::optional<ReadBits> read_limit;     // in the fixed point of the items' reads, times half bits
};

// What a choice of options costs, summed in the order of the items.
struct AllocationUse {
  int64_t half_bits = 0;
  ReadBits reads = 0;
  std::vector<double> kl;  // [n_domains]
  double objective = 0;
};

// Multipliers of the constraints at the best dual point: what one more unit is worth.
struct AllocationPrices {
  double storage = 0;          // KL per half bit
  double reads = 0;            // KL per half bit and unit of reads
  std::vector<double> guards;  // [n_domains], 0 without a limit
};

struct Allocation {
  std::vector<int> choice;  // [n_items] index into the item's options
  AllocationUse use;
  double dual_bound = 0;  // no feasible choice has a smaller objective
  double gap = 0;         // (objective - dual_bound) / objective, 0 for an objective of 0
  AllocationPrices prices;
  bool is_proved_optimal = false;  // by exhaustive search; done when few items are left open
  int64_t dual_evaluations = 0, exchanges = 0, search_nodes = 0;
};

AllocationUse allocation_use(const AllocationProblem& problem, const std::vector<int>& choice);
bool is_within_limits(const AllocationProblem& problem, const AllocationUse& use);

// Errors: invalid_argument for a malformed problem; failed_precondition when no choice meets the limits, naming the
// limit that cannot be met alone and what is the least it could be, or the limits that cannot be met together. Cost:
// 46,080 items with storage and read limits take a fraction of a second (bench/allocate.cpp). Threads: pure.
Result<Allocation> allocate(const AllocationProblem& problem);

// floor(2 * bpw * weights) with bpw taken to nine decimals: the budget in half bits that `bpw` bits per weight mean.
// Errors: invalid_argument unless 0 <= bpw <= 64.
Result<ReadBits> half_bits_at(double bpw, ReadBits weights);

}  // namespace espalier
