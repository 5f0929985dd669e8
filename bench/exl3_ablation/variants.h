// Ways to quantize that bench_exl3_ablation compares with the defaults.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "codec/quantizer.h"

namespace espalier::ablation {

struct Variant {
  std::string name;
  std::function<void(codec::QuantizeOptions&)> change;
  bool shares_inputs = false;  // matrices of the same inputs get one input scale; others are left out
};

// The defaults (first), then every option of codec::QuantizeOptions that has another value to try, one at a time, and
// the presets. Without those of an output metric (`output`, `output_damping`, the rule's column_metric): the pipeline
// has none, so there is nothing to compare with.
std::vector<Variant> standard_variants();

// "damping=0.1,descent=2". Keys: damping, descent, refit, cuts, draws, two, tiles, blocks, spread (a factor on the
// best), a, b, c (exponents of rows by weight and Hessian and of columns), preset. Errors: invalid_argument naming the
// key or the value.
Result<Variant> parse_variant(const std::string& text);

}  // namespace espalier::ablation
