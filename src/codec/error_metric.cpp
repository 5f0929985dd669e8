#include "codec/error_metric.h"

#include <cmath>

#include "codec/block_ldl.h"
#include "codec/strip_product.h"
#include "tensor/float_formats.h"

namespace espalier::codec {
namespace {

// Columns [16*strip, 16*strip + 16) of a [rows, cols].
void load_strip(const double* a, int64_t rows, int64_t cols, int64_t strip, double* out) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int c = 0; c < kStripWidth; ++c) out[i * kStripWidth + c] = a[i * cols + strip * kStripWidth + c];
  }
}

// out [a_rows, b_cols] = a [a_rows, inner] b [inner, b_cols].
void multiply(const double* a, int64_t a_rows, const double* b, int64_t inner, int64_t b_cols, double* out,
              SimdTier tier, ThreadPool& pool) {
  pool.parallel_for(b_cols / kStripWidth, 1, [&](int64_t begin, int64_t end) {
    std::vector<double> strip_of(static_cast<size_t>(inner * kStripWidth));
    for (int64_t strip = begin; strip < end; ++strip) {
      load_strip(b, inner, b_cols, strip, strip_of.data());
      StripProduct product;
      product.a = a;
      product.a_stride = inner;
      product.strip = strip_of.data();
      product.out = out + strip * kStripWidth;
      product.out_stride = b_cols;
      product.rows = a_rows;
      product.cols = inner;
      strip_product(product, tier);
    }
  });
}

std::vector<double> transpose(const double* a, int64_t rows, int64_t cols) {
  std::vector<double> out(static_cast<size_t>(rows * cols));
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) out[static_cast<size_t>(j * rows + i)] = a[i * cols + j];
  }
  return out;
}

// scale *= factor, rounded to fp16; returns what the scale was really multiplied by.
double apply_factor(uint16_t& scale, double factor) {
  const double old_value = decode_f16(scale);
  if (old_value == 0 || !std::isfinite(factor) || factor < 0.5 || factor > 2.0) return 1.0;
  const uint16_t bits = encode_f16(static_cast<float>(old_value * factor));
  const double new_value = decode_f16(bits);
  if (!std::isfinite(new_value) || new_value == 0) return 1.0;
  scale = bits;
  return new_value / old_value;
}

}  // namespace

ErrorMetric::ErrorMetric(const float* weight, int64_t k, int64_t n, const double* hessian, const OutputMetric& output,
                         SimdTier tier, ThreadPool& pool)
    : k_(k), n_(n), hessian_(hessian), output_(output), tier_(tier), weight_(weight, weight + k * n) {
  Matrix hw = times_hessian(weight_, 0, pool);
  power_ = inner(weight_, weight_, pool);
  cost_ = inner(weight_, hw, pool);
  product_ = times_output(hw, pool);
  weight_out_ = times_output(weight_, pool);
  weighted_ = inner(weight_, product_, pool);
}

ErrorMetric::Matrix ErrorMetric::times_hessian(const Matrix& a, double damping, ThreadPool& pool) const {
  Matrix out(a.size());
  if (hessian_ != nullptr) multiply(hessian_, k_, a.data(), k_, n_, out.data(), tier_, pool);
  const double own = hessian_ == nullptr ? 1.0 + damping : damping;
  for (size_t i = 0; i < a.size(); ++i) out[i] += own * a[i];
  return out;
}

ErrorMetric::Matrix ErrorMetric::times_output(const Matrix& a, ThreadPool& pool) const {
  if (output_.full != nullptr) {
    Matrix out(a.size());
    multiply(a.data(), k_, output_.full, n_, n_, out.data(), tier_, pool);
    return out;
  }
  Matrix out = a;
  if (output_.diagonal == nullptr) return out;
  for (int64_t i = 0; i < k_; ++i) {
    for (int64_t j = 0; j < n_; ++j) out[static_cast<size_t>(i * n_ + j)] *= output_.diagonal[j];
  }
  return out;
}

// Sum of products: each row in ascending order, then the rows.
double ErrorMetric::inner(const Matrix& a, const Matrix& b, ThreadPool& pool) const {
  std::vector<double> rows(static_cast<size_t>(k_));
  pool.parallel_for(k_, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      double sum = 0;
      for (int64_t at = i * n_; at < (i + 1) * n_; ++at) sum += a[static_cast<size_t>(at)] * b[static_cast<size_t>(at)];
      rows[static_cast<size_t>(i)] = sum;
    }
  });
  double sum = 0;
  for (double row : rows) sum += row;
  return sum;
}

ErrorMeasures ErrorMetric::measure(const float* decoded, ThreadPool& pool) const {
  Matrix error(weight_);
  for (size_t i = 0; i < error.size(); ++i) error[i] -= double{decoded[i]};
  ErrorMeasures measures;
  if (!(power_ > 0)) return measures;
  measures.relative_mse = inner(error, error, pool) / power_;
  const Matrix he = times_hessian(error, 0, pool);
  measures.true_error = hessian_ == nullptr ? measures.relative_mse : cost_ > 0 ? inner(error, he, pool) / cost_ : 0.0;
  measures.weighted_error = measures.true_error;
  if (output_.full != nullptr || output_.diagonal != nullptr) {
    measures.weighted_error = weighted_ > 0 ? inner(he, times_output(error, pool), pool) / weighted_ : 0.0;
  }
  return measures;
}

// ((Q^T H Q) o G) c = wanted; empty when the system cannot be solved.
std::vector<double> ErrorMetric::coupled_output_factors(const Matrix& decoded, const Matrix& hq,
                                                        const std::vector<double>& wanted, ThreadPool& pool) const {
  std::vector<double> system(static_cast<size_t>(n_ * n_));
  const std::vector<double> q = transpose(decoded.data(), k_, n_);
  multiply(q.data(), n_, hq.data(), k_, n_, system.data(), tier_, pool);
  double mean = 0;
  for (size_t i = 0; i < system.size(); ++i) system[i] *= output_.full[i];
  for (int64_t j = 0; j < n_; ++j) mean += system[static_cast<size_t>(j * n_ + j)] / static_cast<double>(n_);
  for (int64_t j = 0; j < n_; ++j) system[static_cast<size_t>(j * n_ + j)] += 1e-6 * mean;
  if (!cholesky_upper(system.data(), n_, pool, tier_)) return {};
  std::vector<double> factors = wanted;
  solve_cholesky(system.data(), n_, factors.data());
  return factors;
}

void ErrorMetric::refit_outputs(double damping, Matrix& decoded, Exl3Tensor& tensor, ThreadPool& pool) const {
  const Matrix hq = times_hessian(decoded, damping, pool);
  std::vector<double> factors(static_cast<size_t>(n_)), power(static_cast<size_t>(n_));
  for (int64_t i = 0; i < k_; ++i) {
    for (int64_t j = 0; j < n_; ++j) {
      const auto at = static_cast<size_t>(i * n_ + j);
      factors[static_cast<size_t>(j)] += weight_out_[at] * hq[at];
      power[static_cast<size_t>(j)] += decoded[at] * hq[at];
    }
  }
  if (output_.full != nullptr) {
    factors = coupled_output_factors(decoded, hq, factors, pool);
    if (factors.empty()) return;  // keeps the scales that are there
  } else {
    for (size_t j = 0; j < factors.size(); ++j)
      factors[j] /= output_.diagonal != nullptr ? output_.diagonal[j] * power[j] : power[j];
  }
  for (size_t j = 0; j < factors.size(); ++j) factors[j] = apply_factor(tensor.svh[j], factors[j]);
  for (int64_t i = 0; i < k_; ++i) {
    for (int64_t j = 0; j < n_; ++j) decoded[static_cast<size_t>(i * n_ + j)] *= factors[static_cast<size_t>(j)];
  }
}

// ((Q G Q^T) o H) r = rowsum(Q o (H W G)).
void ErrorMetric::refit_inputs(double damping, Matrix& decoded, Exl3Tensor& tensor, ThreadPool& pool) const {
  std::vector<double> r(static_cast<size_t>(k_));
  for (int64_t i = 0; i < k_; ++i) {
    for (int64_t at = i * n_; at < (i + 1) * n_; ++at) {
      r[static_cast<size_t>(i)] += decoded[static_cast<size_t>(at)] *
                                   (product_[static_cast<size_t>(at)] + damping * weight_out_[static_cast<size_t>(at)]);
    }
  }
  std::vector<double> system(static_cast<size_t>(k_ * k_));
  {
    const Matrix qg = times_output(decoded, pool);
    pool.parallel_for(k_ / kStripWidth, 1, [&](int64_t begin, int64_t end) {
      std::vector<double> transposed(static_cast<size_t>(n_ * kStripWidth));
      for (int64_t strip = begin; strip < end; ++strip) {
        const int64_t first = strip * kStripWidth;
        for (int c = 0; c < kStripWidth; ++c) {
          for (int64_t j = 0; j < n_; ++j)
            transposed[static_cast<size_t>(j * kStripWidth + c)] = decoded[static_cast<size_t>((first + c) * n_ + j)];
        }
        StripProduct product;  // columns [first, first + 16) down to the diagonal
        product.a = qg.data();
        product.a_stride = n_;
        product.strip = transposed.data();
        product.out = system.data() + first;
        product.out_stride = k_;
        product.rows = first + kStripWidth;
        product.cols = n_;
        strip_product(product, tier_);
        for (int64_t i = 0; i < product.rows; ++i) {
          for (int64_t m = first; m < first + kStripWidth; ++m) {
            const double h = hessian_ == nullptr ? (i == m ? 1.0 : 0.0) : hessian_[i * k_ + m];
            system[static_cast<size_t>(i * k_ + m)] *= h + (i == m ? damping : 0.0);
          }
        }
      }
    });
  }
  double mean = 0;
  for (int64_t i = 0; i < k_; ++i) mean += system[static_cast<size_t>(i * k_ + i)] / static_cast<double>(k_);
  for (int64_t i = 0; i < k_; ++i) system[static_cast<size_t>(i * k_ + i)] += 1e-6 * mean;
  if (!cholesky_upper(system.data(), k_, pool, tier_)) return;  // keeps the scales that are there
  solve_cholesky(system.data(), k_, r.data());
  for (int64_t i = 0; i < k_; ++i) {
    const double factor = apply_factor(tensor.suh[static_cast<size_t>(i)], r[static_cast<size_t>(i)]);
    for (int64_t at = i * n_; at < (i + 1) * n_; ++at) decoded[static_cast<size_t>(at)] *= factor;
  }
}

void ErrorMetric::refit_scales(double damping, int n_rounds, Exl3Tensor& tensor, ThreadPool& pool) const {
  std::vector<float> stored(static_cast<size_t>(k_ * n_));
  decode_weight(tensor.view(), stored.data(), pool);
  Matrix decoded(stored.begin(), stored.end());
  for (int round = 0; round < n_rounds; ++round) {
    refit_outputs(damping, decoded, tensor, pool);
    refit_inputs(damping, decoded, tensor, pool);
  }
}

ErrorMeasures measure_error(const float* weight, const float* decoded, int64_t k, int64_t n, const double* hessian,
                            ThreadPool& pool) {
  return ErrorMetric(weight, k, n, hessian, OutputMetric(), active_simd_tier(), pool).measure(decoded, pool);
}

}  // namespace espalier::codec
