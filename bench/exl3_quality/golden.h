// The golden cases: matrices that the real exllamav3 v1.4.1 quantized, with its weights, Hessians and results.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "base/progress.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "codec/codebook.h"

namespace espalier::quality {

struct GoldenResult {
  std::string name;
  int64_t k = 0, n = 0;
  int k2 = 0;
  codec::Codebook codebook = codec::Codebook::kMul1;
  double recorded = 0;        // true error of exllamav3's stored result
  double restated = 0;        // of the restatement with the stored signs
  double fast = 0, best = 0;  // of ours, geometric mean over sign seeds
};

// Cases with a stored Hessian or activations (24 when all files are there). `dirs`: folders to look for the files in,
// in order; a file found in none is left out. n_seeds sign seeds for ours.
Result<std::vector<GoldenResult>> run_golden(const std::vector<std::filesystem::path>& dirs, int n_seeds,
                                             Progress& progress, ThreadPool& pool);

}  // namespace espalier::quality
