// Row and column scales of a matrix before rotation. Internal to the quantizer.
//
//   su_i ~ rms_i^a * H_ii^-b               (3/4, 1/8): between the optimum without feedback (1/2, 1/4) and with ideal
//   feedback (1, 0) sv_j ~ column rms^c * G_jj^-d          the same for the output metric G: (3/4, 1/8) with feedback
//   along the outputs, else (1/2, 1/4)
// then every 128-row and 128-column block is brought to one rms, so that all tiles meet the codebook at its best
// spread. Our own power function, sums in index order: the same bits everywhere. Source: docs/formats/exl3.md,
// "Scales".
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "codec/codebook.h"

namespace espalier::codec {

struct WeightScales {
  std::vector<uint16_t> suh, svh;  // fp16 with signs; 0 for rows and columns without weights
  std::vector<double> su, sv;      // their magnitudes for the metrics; what has no weights gets its block's least scale
  int64_t n_zero_rows = 0;
  int64_t n_zero_columns = 0;
  // Of those, the ones that have weights, which are lost because the scale is below fp16's range; and the first of
  // each.
  int64_t n_lost_rows = 0;
  int64_t n_lost_columns = 0;
  int64_t first_lost_row = -1;
  int64_t first_lost_column = -1;
  bool is_zero = false;  // nothing to encode
};

// Standard deviation of tile entries, in codebook units, at which the search loses least (measured on Gaussian tiles),
// less what error feedback adds to the targets.
double best_spread(Codebook codebook, int k2);

struct ScaleRule {
  double row_weight = 0.75;    // a
  double row_hessian = 0.125;  // b
  double column_weight = -1;   // c; negative: 3/4 with feedback along the outputs, 1/2 without
  double column_metric =
      -1;  // d, used with an output metric only; negative: 1/8 with feedback along the outputs, 1/4 without
  bool normalise_blocks = true;  // false: one spread for the whole matrix
};

struct ScaleRequest {
  const float* weight = nullptr;  // [k, n], finite
  int64_t k = 0;
  int64_t n = 0;
  const double* diagonal = nullptr;         // [k] of the damped Hessian, positive
  const double* output_diagonal = nullptr;  // [n] of the damped output metric, positive; null: none
  double spread = 1;                        // wanted rms in codebook units
  ScaleRule rule;
  bool two_sided = true;  // feedback along the outputs: what the rule's negative exponents stand for
  uint64_t seed = 0;      // signs are drawn from (seed, name)
  std::string name;
};

// Errors: failed_precondition when the magnitudes do not fit fp16 scales.
Result<WeightScales> choose_scales(const ScaleRequest& request);

}  // namespace espalier::codec
