// One weight matrix -> one EXL3 tensor: scales and signs, rotation, LDLQ with error feedback, trellis search, refit.
//
// Minimises tr(E^T H E) for the Hessian H = X^T X of the layer's inputs. The Hessian is scaled consistently with the
// row scales (su ~ rms^3/4 * H_ii^-1/8, sv ~ column rms^1/2, 128-blocks brought to one rms), which exllamav3 does not
// do. All of it is fp64 in a fixed order around an exact search: the same bytes for any number of threads and SIMD
// tier. Source: docs/formats/exl3.md, "Quantizing"; QuIP# (arXiv 2402.04396), block LDLQ.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/simd_tier.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "codec/exl3_tensor.h"
#include "codec/weight_scales.h"

namespace espalier::codec {

// How much errors of the outputs matter: G in tr(E^T H E G), any positive scale. At most one of the two; the memory is
// the caller's and must outlive the call.
struct OutputMetric {
  const double* diagonal = nullptr;  // [n]
  const double* full = nullptr;      // [n, n], symmetric positive semidefinite
};

struct QuantizeOptions {
  int k2 = 6;  // width in half bits, even (K = 1..8)
  Codebook codebook = Codebook::kMul1;
  uint64_t seed = 0;            // signs are drawn from (seed, name)
  std::string name = "matrix";  // the linear's name; also names it in errors
  double damping = 0.025;       // added to the Hessian's diagonal, in units of its mean
  ScaleRule scale_rule;         // how row and column scales follow weights and Hessian
  int descent_sweeps = 0;       // sweeps of coordinate descent after LDLQ; each costs two searches per tile
  int refit_rounds = 1;         // rounds of output and input scale refit; 0: none
  int n_draws = 1;              // draws of signs; the one with the least true error is kept
  int n_cuts = 1;               // see SearchOptions
  double spread = 0;            // wanted rms of the rotated weight in codebook units; 0: the measured best
  int spread_tiles = 0;         // search the spread around that on so many sample tiles; 0: no search
  OutputMetric output;          // without: all outputs count the same
  bool two_sided = true;        // error feedback along the outputs too: the output scales make even the identity uneven
  double output_damping = 0.025;  // added to the output metric's diagonal, in units of its mean
  SimdTier tier = active_simd_tier();
};

// Sets of options by effort. kFast: one search per tile and a small refit; kBest: everything that measurably helps,
// several times the time. Fields that say what to encode (width, codebook, seed, name) keep their defaults.
enum class Preset : uint8_t { kFast, kBest };
QuantizeOptions quantize_preset(Preset preset);
// "fast", "best".
std::string_view preset_name(Preset preset);
std::optional<Preset> preset_from_name(std::string_view name);

enum class HessianUse : uint8_t {
  kCalibrated,  // the given Hessian
  kNone,        // none was given: the identity stands in
  kEmpty,       // the given one is zero (no tokens): treated as none
};
// "calibrated", "none", "empty".
std::string_view hessian_use_name(HessianUse use);

// Something in the matrix or its Hessian that could not be used as it was, and what was done instead.
struct Fallback {
  std::string reason;  // "inputs without calibration activity: weighed by damping alone"
  int64_t count = 0;   // channels concerned; 0: the whole matrix
  int64_t first = -1;  // index of the first of them
};

// "reason" or "reason (3 from index 17 on)".
std::string fallback_text(const Fallback& fallback);

struct QuantizedMatrix {
  Exl3Tensor tensor;
  double true_error = 0;    // tr(E^T H E) / tr(W^T H W), raw H, original basis, stored fp16 scales; 0 for a zero matrix
  double relative_mse = 0;  // |E|^2 / |W|^2
  double weighted_error = 0;  // tr(E^T H E G) / tr(W^T H W G); equal to true_error without an output metric
  HessianUse hessian = HessianUse::kCalibrated;
  double damping = 0;               // what was used in the end (grows when the factorisation needs it)
  int draw = 0;                     // which draw of signs was kept
  int64_t n_zero_rows = 0;          // input channels with suh = 0: decode to exact zeros
  int64_t n_zero_columns = 0;       // output channels with svh = 0
  std::vector<Fallback> fallbacks;  // see docs/formats/exl3.md, "When something is odd"
};

// weight   [k, n]:f32 row-major (in, out), k and n multiples of 128
// hessian  [k, k]:f64 symmetric, any positive scale; null: none
// Errors, all naming options.name: data_loss for NaN or infinity in the weight or the Hessian (with row and column) or
// a negative diagonal; failed_precondition for dimensions that are not multiples of 128, weights too large for fp16
// scales, or a Hessian that no damping makes positive definite; invalid_argument for a bad option; unimplemented for a
// half-bit width. Threads: over column strips.
Result<QuantizedMatrix> quantize_matrix(const float* weight, int64_t k, int64_t n, const double* hessian,
                                        const QuantizeOptions& options, ThreadPool& pool);

// Matrices that read the same inputs, encoded with one input scale: they share suh, so that a reader rotates the inputs
// once, and the factorisation. The group is the unit: the bytes of one depend on the others. options.name is not used
// and an output metric may not be set (checked); options and errors as above, with the names of the matrices.
// `fallbacks` of each are those of the group.
struct SharedInputMatrix {
  const float* weight = nullptr;  // [k, n]
  int64_t n = 0;
  std::string name;
};
Result<std::vector<QuantizedMatrix>> quantize_with_shared_inputs(const std::vector<SharedInputMatrix>& matrices,
                                                                 int64_t k, const double* hessian,
                                                                 const QuantizeOptions& options, ThreadPool& pool);

// tr(E^T H E) / tr(W^T H W) and |E|^2/|W|^2 of a decoded weight against the original; hessian null means identity.
struct ErrorMeasures {
  double true_error = 0;
  double relative_mse = 0;
  double weighted_error = 0;  // with the output metric; equal to true_error without one
};
ErrorMeasures measure_error(const float* weight, const float* decoded, int64_t k, int64_t n, const double* hessian,
                            ThreadPool& pool);

}  // namespace espalier::codec
