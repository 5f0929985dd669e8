// Outcomes of variants as text.
#pragma once

#include <string>
#include <vector>

#include "bench/exl3_ablation/samples.h"

namespace espalier::ablation {

// Of one sample, means over its seeds.
struct Outcome {
  bool is_valid = false;  // the variant does not apply to every sample
  double fit = 0;         // true error with the Hessian that was quantized with
  double held_out = 0;    // with the other; 0: none
};

struct VariantResult {
  std::string name;
  std::vector<Outcome> outcomes;  // one a sample
  double seconds = 0;
};

// A line a variant, a column a group; ratios to results.front(), geometric means over the group's samples. k2: of this
// width only; 0: all.
std::string table_text(const std::vector<Sample>& samples, const std::vector<VariantResult>& results, int k2);

}  // namespace espalier::ablation
