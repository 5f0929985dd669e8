// The flags of the EXL3 quantizer, shared by the commands that encode: a preset, and one flag per option that overrides
// it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "codec/quantizer.h"

namespace CLI {
class App;
}

namespace espalier::app {

struct QuantizerFlags {
  std::string preset = "fast";
  std::string codebook = "mul1";
  std::vector<double> row_exponents;  // two, or none
  std::optional<double> column_exponent;
  std::optional<int> n_cuts, refit_rounds, descent_sweeps, n_draws, spread_tiles;
  bool one_sided = false;
  bool no_blocks = false;
};

void add_quantizer_flags(CLI::App* app, QuantizerFlags* flags);

// What the flags say; width, seed, name and damping keep their defaults. Errors: invalid_argument naming the flag.
Result<codec::QuantizeOptions> quantizer_options(const QuantizerFlags& flags);

}  // namespace espalier::app
