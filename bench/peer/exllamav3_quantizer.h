// exllamav3 v1.4.1's quantizer of one matrix restated, to compare ours with: regularisation, scale search, LDLQ with a
// Hessian that knows the signs of the input scales only, fp16-cost search; and, as options, what its 1.5 line adds.
//
// Sums are fp64 where upstream's are fp32 in an order of its own; on the golden cases everything up to the search
// agrees to fp32's noise and most tiles come out bit for bit (tests/unit/peer). Deterministic; one thread. Source: EXL3
// specification 5.3 to 5.7.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/peer/exllamav3_hessian.h"
#include "bench/peer/exllamav3_search.h"
#include "codec/exl3_tensor.h"

namespace espalier::peer {

enum class OutScales : uint8_t { kAlways, kNever, kAuto };

struct QuantizerRules {
  codec::Codebook codebook = codec::Codebook::kMul1;
  int k2 = 6;
  double damping = 0.025;                     // sigma_reg
  OutScales out_scales = OutScales::kAlways;  // v1.4.1's default
  bool fixed_argmin = false;                  // [1.5+]; half-bit widths always have it
  bool drift = false;                         // [1.5+] scale search on tiles inflated as feedback will inflate them
  bool refit = false;                         // [1.5+] two rounds of output and input scale refit
  SearchTier tier = best_search_tier();
};

// +-1 as drawn by upstream: the stored suh has the opposite sign in every row.
struct Signs {
  std::vector<float> su;  // [k]
  std::vector<float> sv;  // [n]
};
// The signs that our quantizer draws from (seed, name), so that both sides of a comparison share them.
Signs signs_from_seed(uint64_t seed, const std::string& name, int64_t k, int64_t n);
// The signs of a stored tensor; +1 where a scale is zero.
Signs signs_of(const codec::Exl3Tensor& tensor);

struct QuantizedMatrix {
  codec::Exl3Tensor tensor;
  double g_scale = 0;
  bool has_out_scales = false;
  double proxy_error =
      0;  // upstream's own measure: damped, rotated, without row magnitudes; plain mse without a Hessian
  // What went into the search, for tests.
  std::vector<float> weight_r;  // [k, n]
  std::vector<float> su, sv;    // unrounded, before refit
  PreparedHessian hessian;
};

// Owns the search; one object per thread.
class Quantizer {
 public:
  explicit Quantizer(const QuantizerRules& rules);
  // weight [k, n]:f32 finite, k and n multiples of 128 (checked); hessian [k, k] symmetric or null.
  QuantizedMatrix quantize(const float* weight, int64_t k, int64_t n, const double* hessian, const Signs& signs);

 private:
  double search_scale(const std::vector<float>& weight, int64_t k, int64_t n);
  double scale_error(const std::vector<std::vector<float>>& tiles, size_t stride, double scale, double give_up);
  std::vector<float> encode(QuantizedMatrix& out);

  QuantizerRules rules_;
  TileSearch search_;
};

}  // namespace espalier::peer
