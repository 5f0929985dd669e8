// `quantize --dry-run`: what a run would write, from the checkpoint's headers and the options, without reading a weight.
//
// Shards, index, configuration, side files, lock and manifest are laid out by the code that writes them, so their sizes are
// exact; run.json and matrices.jsonl hold measured numbers, whose digits are guessed.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/status.h"
#include "stages/make_pack.h"

namespace espalier {

// Tensors that keep their native form for one reason.
struct NativeGroup {
  std::string what;    // "routers", "attn.wkv"
  std::string reason;
  int64_t n_tensors = 0;
  uint64_t bytes = 0;
};

struct PackPrediction {
  double bpw = 0;              // card definition
  uint64_t bytes = 0;          // of the whole folder
  uint64_t tensor_bytes = 0;
  int64_t n_tensors = 0;
  int64_t n_matrices = 0;      // quantized
  int64_t n_files = 0;
  double weights = 0;          // to encode
  std::map<std::string, std::map<int, int64_t>> widths;  // part -> half bits -> matrices
  std::vector<NativeGroup> native;
};

// options.data may be empty: the calibration then counts as unknown. options.out is not looked at. Errors: those of reading the
// checkpoint's headers, of the plan and the widths; not_found / data_loss for an incomplete checkpoint.
Result<PackPrediction> predict_pack(const MakePackOptions& options);

}  // namespace espalier
