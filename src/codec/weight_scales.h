// Row and column scales of a matrix before rotation. Internal to the quantizer.
//
//   su_i ~ rms_i^3/4 * H_ii^-1/8      between the optimum without feedback (1/2, 1/4) and with ideal feedback (1, 0)
//   sv_j ~ column rms^1/2             balances noise against the output metric
// then every 128-row and 128-column block is brought to one rms, so that all tiles meet the codebook at its best spread.
// Powers by square roots, sums in index order: the same bits everywhere. Source: docs/formats/exl3.md, "Scales".
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "codec/codebook.h"

namespace espalier::codec {

struct WeightScales {
  std::vector<uint16_t> suh, svh;      // fp16 with signs; 0 for rows and columns without weights
  std::vector<double> su;              // |suh| for the Hessian; rows without weights get their block's least scale
  int64_t n_zero_rows = 0;
  int64_t n_zero_columns = 0;
  bool is_zero = false;                // nothing to encode
};

// Standard deviation of tile entries, in codebook units, at which the search loses least (measured on Gaussian tiles), less
// what error feedback adds to the targets.
double best_spread(Codebook codebook, int k2);

// weight [k, n] finite; diagonal [k] of the damped Hessian, positive. `spread`: wanted rms in codebook units.
// Errors: failed_precondition when the magnitudes do not fit fp16 scales.
Result<WeightScales> choose_scales(const float* weight, int64_t k, int64_t n, const double* diagonal, double spread,
                                   uint64_t seed, const std::string& name);

}  // namespace espalier::codec
