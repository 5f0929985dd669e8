// The matrices that bench_exl3_ablation encodes, with what is needed to judge them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "codec/codebook.h"

namespace espalier::ablation {

struct Sample {
  std::string group;  // column of the table
  std::string name;
  std::string inputs;  // samples that follow each other with the same text read the same inputs; empty: alone
  int64_t k = 0;
  int64_t n = 0;
  int k2 = 6;  // width in half bits
  codec::Codebook codebook = codec::Codebook::kMul1;
  std::vector<float> weight;     // [k, n]
  std::vector<double> hessian;   // [k, k]
  std::vector<double> held_out;  // [k, k] of other rows; empty: none
  double effective_tokens = 0;   // behind the Hessian; 0: unknown
  double recorded = 0;           // exllamav3's true error; 0: unknown
  int n_seeds = 1;
};

// The golden linears with a Hessian, each at its own width, `n_seeds` sign seeds each.
std::vector<Sample> golden_samples(const std::filesystem::path& path, int n_seeds, ThreadPool& pool);

// 512x512 weights with log-normal rows, columns and channels (their deviations; `correlation` of row and channel),
// inputs of rank 16 plus noise: 2048 rows, 8192 others held out. One sample a width.
struct Spread {
  double row = 0;
  double column = 0;
  double channel = 0;
  double correlation = 0;
};
std::vector<Sample> synthetic_samples(const Spread& shape, const std::vector<int>& k2, ThreadPool& pool);

// One routed expert a layer of the model in `dir`; Hessians as the stage `quantize` makes them from 24 calibration rows
// through the native network, held out from 24 others. Errors: those of loading the model and its data set.
Result<std::vector<Sample>> expert_samples(const std::string& dir, const std::vector<int>& k2, ThreadPool& pool);

}  // namespace espalier::ablation
