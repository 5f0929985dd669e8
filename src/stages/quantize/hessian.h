// Hessians of linear layers: H = sum_t w_t x_t x_t^T over calibration tokens, and the shrinkage towards a layer-wide
// prior.
//
// Order: tokens are cut into chunks of 1,024 in the order given; inside a chunk every element is one fp32 FMA chain
// over ascending tokens, chunks are added in order in fp64. The bytes do not depend on how rows arrive, on threads or
// on the SIMD tier. Only the lower triangle is computed; the upper is its mirror. Source: quality
// specification 1.4, 1.5.
#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.h"

namespace espalier {

struct Hessian {
  int64_t k = 0;
  std::vector<double> sum;       // [k, k], symmetric; empty until finish()
  int64_t rows = 0;              // rows that count
  int64_t dropped = 0;           // rows with a non-finite entry, left out
  double weight_sum = 0;         // sum of w_t
  double weight_square_sum = 0;  // sum of w_t^2

  // Effective sample size (sum w)^2 / sum w^2; 0 without rows.
  double effective_rows() const { return weight_square_sum > 0 ? weight_sum * weight_sum / weight_square_sum : 0; }
  double trace() const;
};

class HessianAccumulator {
 public:
  static constexpr int64_t kChunkRows = 1024;

  explicit HessianAccumulator(int64_t k);

  // x [n_rows, k]. scale: [n_rows] factors s_t >= 0, so that w_t = s_t^2, or null for 1. A scaled row is s_t * x_t in
  // fp32.
  void add(ThreadPool& pool, const float* x, int64_t n_rows, const float* scale = nullptr);
  // Ends the last chunk and gives the result away; the accumulator is empty afterwards.
  Hessian finish(ThreadPool& pool);

  int64_t rows() const { return hessian_.rows; }

 private:
  void flush(ThreadPool& pool);

  int64_t padded_ = 0;  // k rounded up to the panel width
  Hessian hessian_;
  int64_t filled_ = 0;             // rows of the open chunk
  std::vector<float> rows_;        // [kChunkRows, k] of the open chunk, scaled
  std::vector<float> transposed_;  // [k, kChunkRows + padding]
  std::vector<float> panels_;      // [padded/32, filled, 32]
  std::vector<float> partial_;     // [k, padded] of one chunk
};

// How much to add to a Hessian's diagonal, in units of its mean, when `effective_rows` tokens made it.
double default_damping(double effective_rows, int64_t k);

// Mean over all tokens of a layer (or of a sample): what rarely routed experts are shrunk towards.
struct HessianPrior {
  std::vector<double> mean;  // [k, k]; empty: no prior
  double trace = 0;
};
HessianPrior make_prior(const Hessian& all_tokens);

// (n_e A_e + n0 s_e Abar) / (n_e + n0), A_e = H_e / sum w, s_e = tr(A_e) / tr(Abar), or 1 without tokens. With n0 = 0
// or without a prior: H_e itself. An expert without tokens and without prior gives the zero matrix.
struct BlendedHessian {
  std::vector<double> values;  // [k, k]
  double prior_fraction = 0;   // n0 / (n_e + n0)
};
BlendedHessian blend_with_prior(Hessian hessian, const HessianPrior& prior, double n0);

}  // namespace espalier
