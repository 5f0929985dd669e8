// The flags that say how matrices are encoded from calibration rows, shared by the commands that do it: widths of what is not a
// routed expert, Hessians, the stream, and the quantizer's own.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "apps/espalier/command.h"
#include "apps/espalier/quantizer_flags.h"
#include "base/status.h"
#include "stages/quantize/quantize.h"

namespace CLI {
class App;
}

namespace espalier::app {

struct EncodeFlags {
  QuantizerFlags quantizer;
  std::string numerics = "kvq";
  std::string w2_input = "quantized";
  std::string stream = "quantized";
  std::string output_metrics = "model";
  std::optional<double> dense_bits, head_bits, drafter_bits;  // absent: as --bits
  int64_t draft_stride = 8;
  int64_t prior_sample = 4096;
  double damping = -1;  // negative: by effective tokens
  bool shared_scales = false;
  double routing_exponent = 2;
  double prior_w13 = -1, prior_w2 = -1;  // negative: default
};

void add_encode_flags(CLI::App* app, EncodeFlags* flags);

// Writes what the flags say into *options; widths of routed experts and plans are left alone. Errors: invalid_argument naming the
// flag.
Status take_encode_flags(const EncodeFlags& flags, const CommonOptions& common, QuantizeOptions* options);

}  // namespace espalier::app
