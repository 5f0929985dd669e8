#include "codec/quantizer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "codec/block_ldl.h"
#include "codec/hadamard.h"
#include "codec/scale_refit.h"
#include "codec/viterbi.h"
#include "codec/weight_scales.h"
#include "tensor/float_formats.h"

namespace espalier::codec {
namespace {

constexpr int kMaxRetries = 10;

Status check_request(const float* weight, int64_t k, int64_t n, const QuantizeOptions& options) {
  if (k <= 0 || n <= 0 || k % kBlock != 0 || n % kBlock != 0) {
    return failed_precondition(options.name + ": expected dimensions that are multiples of 128, found [" + std::to_string(k) +
                            ", " + std::to_string(n) + "]; leave the matrix unquantized or pad it");
  }
  if (!is_width(options.k2)) {
    return invalid_argument(options.name + ": no such width: " + std::to_string(options.k2) + " half bits");
  }
  if (!is_searchable_width(options.k2, options.codebook)) {
    return invalid_argument(options.name + ": " + width_text(options.k2) + " bits need the codebook mul1, found " +
                            std::string(codebook_name(options.codebook)) + "; use mul1 or a whole number of bits");
  }
  if (options.n_cuts != 1 && options.n_cuts != 2 && options.n_cuts != 4) {
    return invalid_argument(options.name + ": expected 1, 2 or 4 cuts, found " + std::to_string(options.n_cuts));
  }
  if (!(options.damping >= 0) || !std::isfinite(options.damping) || options.refit_rounds < 0 ||
      !(options.spread >= 0 && options.spread < 100)) {
    return invalid_argument(options.name + ": damping, refit rounds and spread must not be negative");
  }
  for (int64_t i = 0; i < k * n; ++i) {
    if (!std::isfinite(weight[i])) {
      return data_loss(options.name + ": weight[" + std::to_string(i / n) + ", " + std::to_string(i % n) + "] is " +
                              (std::isnan(weight[i]) ? "NaN" : "infinite") + "; expected finite weights, check the checkpoint");
    }
  }
  return ok_status();
}

Status check_hessian(const double* hessian, int64_t k, const std::string& name) {
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < k; ++j) {
      if (!std::isfinite(hessian[i * k + j])) {
        return data_loss(name + ": Hessian[" + std::to_string(i) + ", " + std::to_string(j) +
                                "] is not finite; the calibration activations overflowed");
      }
    }
    if (hessian[i * k + i] < 0) {
      return data_loss(name + ": Hessian[" + std::to_string(i) + ", " + std::to_string(i) +
                              "] is negative; expected X^T X");
    }
  }
  return ok_status();
}

// Symmetric, mean diagonal 1; the identity when there is nothing to use.
std::vector<double> normalised_hessian(const double* hessian, int64_t k, HessianUse& use) {
  std::vector<double> h(static_cast<size_t>(k * k));
  double mean = 0;
  if (hessian != nullptr) {
    for (int64_t i = 0; i < k; ++i) mean += hessian[i * k + i] / static_cast<double>(k);
  }
  use = hessian == nullptr ? HessianUse::kNone : mean > 0 ? HessianUse::kCalibrated : HessianUse::kEmpty;
  if (use != HessianUse::kCalibrated) {
    for (int64_t i = 0; i < k; ++i) h[static_cast<size_t>(i * k + i)] = 1.0;
    return h;
  }
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < k; ++j) {
      h[static_cast<size_t>(i * k + j)] = 0.5 * (hessian[i * k + j] / mean + hessian[j * k + i] / mean);
    }
  }
  return h;
}

// Hk diag(su) (H + damping) diag(su) Hk, with signs.
std::vector<double> rotated_hessian(const std::vector<double>& h, int64_t k, double damping, const WeightScales& scales) {
  std::vector<double> signed_su(scales.su);
  for (size_t i = 0; i < signed_su.size(); ++i) {
    if ((scales.suh[i] & 0x8000u) != 0) signed_su[i] = -signed_su[i];
  }
  std::vector<double> r(h.size());
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < k; ++j) {
      const double value = h[static_cast<size_t>(i * k + j)] + (i == j ? damping : 0.0);
      r[static_cast<size_t>(i * k + j)] = value * signed_su[static_cast<size_t>(i)] * signed_su[static_cast<size_t>(j)];
    }
  }
  hadamard_along_rows(r.data(), k, k);
  hadamard_along_columns(r.data(), k, k);
  return r;
}

// Hk diag(1/suh) W diag(1/svh) Hn; rows and columns without a scale become zero.
std::vector<double> rotated_weight(const float* weight, int64_t k, int64_t n, const WeightScales& scales) {
  std::vector<double> w(static_cast<size_t>(k * n));
  for (int64_t i = 0; i < k; ++i) {
    const double su = decode_f16(scales.suh[static_cast<size_t>(i)]);
    for (int64_t j = 0; j < n; ++j) {
      const double sv = decode_f16(scales.svh[static_cast<size_t>(j)]);
      w[static_cast<size_t>(i * n + j)] = su != 0 && sv != 0 ? double{weight[i * n + j]} / su / sv : 0.0;
    }
  }
  hadamard_along_rows(w.data(), k, n);
  hadamard_along_columns(w.data(), k, n);
  return w;
}

// LDLQ on one strip of 16 columns: row blocks from the last to the first, each target corrected by the errors below it.
void encode_strip(const std::vector<double>& w, const std::vector<double>& feedback, int64_t strip,
                  const SearchOptions& search, Exl3Tensor& tensor) {
  const int64_t k = tensor.k;
  const int64_t n = tensor.n;
  const uint8_t* to_row_major = ring_to_row_major();
  const float* values = codebook_table_f32(tensor.codebook);
  std::vector<double> error(static_cast<size_t>(k * kTile));
  for (int64_t b = k / kTile - 1; b >= 0; --b) {
    double correction[kTileSize] = {};
    for (int64_t r = (b + 1) * kTile; r < k; ++r) {
      const double* factors = feedback.data() + (b * k + r) * kTile;
      const double* below = error.data() + r * kTile;
      for (int i = 0; i < kTile; ++i) {
        for (int c = 0; c < kTile; ++c) correction[i * kTile + c] += factors[i] * below[c];
      }
    }
    float target[kTileSize];
    uint16_t states[kTileSize];
    const double* corner = w.data() + b * kTile * n + strip * kTile;
    for (int p = 0; p < kTileSize; ++p) {
      const int e = to_row_major[p];
      const double t = corner[(e / kTile) * n + e % kTile] + correction[e];
      target[p] = static_cast<float>(std::clamp(t, -1e6, 1e6));
    }
    search_tile(target, search, states);
    for (int p = 0; p < kTileSize; ++p) {
      const int e = to_row_major[p];
      error[static_cast<size_t>(b * kTileSize + e)] = corner[(e / kTile) * n + e % kTile] - double{values[states[p]]};
    }
    pack_tile(states, tensor.k2, tensor.trellis.data() + (b * (n / kTile) + strip) * tile_words(tensor.k2));
  }
}

}  // namespace

std::string_view hessian_use_name(HessianUse use) {
  switch (use) {
    case HessianUse::kCalibrated: return "calibrated";
    case HessianUse::kNone: return "none";
    case HessianUse::kEmpty: return "empty";
  }
  return "unknown";
}

Result<QuantizedMatrix> quantize_matrix(const float* weight, int64_t k, int64_t n, const double* hessian,
                                        const QuantizeOptions& options, ThreadPool& pool) {
  RETURN_IF_ERROR(check_request(weight, k, n, options));
  if (hessian != nullptr) RETURN_IF_ERROR(check_hessian(hessian, k, options.name));

  QuantizedMatrix result;
  result.damping = options.damping;
  const std::vector<double> h = normalised_hessian(hessian, k, result.hessian);
  std::vector<double> diagonal(static_cast<size_t>(k));
  for (int64_t i = 0; i < k; ++i) {
    diagonal[static_cast<size_t>(i)] = std::max(h[static_cast<size_t>(i * k + i)] + options.damping, 1e-6);
  }
  const double spread = options.spread > 0 ? options.spread : best_spread(options.codebook, options.k2);
  ASSIGN_OR_RETURN(const WeightScales scales,
                   choose_scales(weight, k, n, diagonal.data(), spread, options.seed, options.name));
  Exl3Tensor& tensor = result.tensor;
  tensor.k = k;
  tensor.n = n;
  tensor.k2 = options.k2;
  tensor.codebook = options.codebook;
  tensor.suh = scales.suh;
  tensor.svh = scales.svh;
  tensor.trellis.assign(static_cast<size_t>(trellis_words(k, n, options.k2)), 0);
  result.n_zero_rows = scales.n_zero_rows;
  result.n_zero_columns = scales.n_zero_columns;
  if (scales.is_zero) {  // all zero, or below what fp16 scales can hold: decodes to zeros, so everything that was there is lost
    const bool had_weights = std::any_of(weight, weight + k * n, [](float x) { return x != 0.0f; });
    result.true_error = result.relative_mse = had_weights ? 1.0 : 0.0;
    return result;
  }

  std::vector<double> factor = rotated_hessian(h, k, result.damping, scales);
  for (int retry = 0; !cholesky_upper(factor.data(), k, pool); ++retry) {
    if (retry == kMaxRetries) {
      return failed_precondition(options.name + ": the Hessian is not positive definite even with damping " +
                              std::to_string(result.damping) + " of its mean diagonal; expected X^T X of finite activations");
    }
    result.damping += std::max(2 * options.damping, 0.01);
    factor = rotated_hessian(h, k, result.damping, scales);
  }
  const std::vector<double> feedback = block_ldl_feedback(factor.data(), k, pool);
  const std::vector<double> w = rotated_weight(weight, k, n, scales);
  SearchOptions search;
  search.codebook = options.codebook;
  search.k2 = options.k2;
  search.n_cuts = options.n_cuts;
  search.tier = options.tier;
  pool.parallel_for(n / kTile, 1, [&](int64_t begin, int64_t end) {
    for (int64_t strip = begin; strip < end; ++strip) encode_strip(w, feedback, strip, search, tensor);
  });

  std::vector<float> decoded(static_cast<size_t>(k * n));
  decode_weight(tensor.view(), decoded.data(), pool);
  ErrorMeasures measures = measure_error(weight, decoded.data(), k, n, hessian != nullptr ? h.data() : nullptr, pool);
  if (options.refit_rounds > 0) {
    Exl3Tensor refitted = tensor;
    refit_scales(weight, h, result.damping, options.refit_rounds, refitted, pool);
    decode_weight(refitted.view(), decoded.data(), pool);
    const ErrorMeasures after = measure_error(weight, decoded.data(), k, n, hessian != nullptr ? h.data() : nullptr, pool);
    if (after.true_error < measures.true_error) {
      measures = after;
      tensor = std::move(refitted);
    }
  }
  result.true_error = measures.true_error;
  result.relative_mse = measures.relative_mse;
  return result;
}

}  // namespace espalier::codec
