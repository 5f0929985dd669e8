#include "codec/scale_refit.h"

#include <cmath>
#include <cstring>

#include "codec/block_ldl.h"
#include "codec/quantizer.h"
#include "tensor/float_formats.h"

namespace espalier::codec {
namespace {

constexpr int kStrip = 16;

// Two fp64 lanes: the baseline's vector, written out because the compiler does not keep sixteen sums in registers otherwise.
typedef double Pair __attribute__((vector_size(16)));

// out [k, 16] = h a for a strip a [k, 16]; h symmetric [k, k] plus `damping` on the diagonal; sums over ascending rows of a.
void multiply_strip(const double* h, double damping, int64_t k, const double* a, double* out) {
  constexpr int kPairs = kStrip / 2;
  for (int64_t i = 0; i < k; ++i) {
    Pair sum[kPairs] = {};
    const double* row = h + i * k;
    for (int64_t j = 0; j < k; ++j) {
      const Pair factor = {row[j], row[j]};
#pragma GCC unroll 8
      for (int c = 0; c < kPairs; ++c) {
        Pair value;
        std::memcpy(&value, a + j * kStrip + 2 * c, sizeof value);
        sum[c] += factor * value;
      }
    }
    for (int c = 0; c < kStrip; ++c) out[i * kStrip + c] = sum[c / 2][c % 2] + damping * a[i * kStrip + c];
  }
}

void load_strip(const float* matrix, int64_t k, int64_t n, int64_t strip, double* out) {
  for (int64_t i = 0; i < k; ++i) {
    for (int c = 0; c < kStrip; ++c) out[i * kStrip + c] = matrix[i * n + strip * kStrip + c];
  }
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

// c_j = (q_j^T H w_j) / (q_j^T H q_j) for every output column.
void refit_outputs(const float* weight, const std::vector<double>& h, double damping, std::vector<float>& decoded,
                   Exl3Tensor& tensor, ThreadPool& pool) {
  const int64_t k = tensor.k;
  const int64_t n = tensor.n;
  pool.parallel_for(n / kStrip, 1, [&](int64_t begin, int64_t end) {
    std::vector<double> w(static_cast<size_t>(k * kStrip)), q(w.size()), hq(w.size());
    for (int64_t strip = begin; strip < end; ++strip) {
      load_strip(weight, k, n, strip, w.data());
      load_strip(decoded.data(), k, n, strip, q.data());
      multiply_strip(h.data(), damping, k, q.data(), hq.data());
      for (int c = 0; c < kStrip; ++c) {
        double wanted = 0;
        double power = 0;
        for (int64_t i = 0; i < k; ++i) {
          wanted += w[static_cast<size_t>(i * kStrip + c)] * hq[static_cast<size_t>(i * kStrip + c)];
          power += q[static_cast<size_t>(i * kStrip + c)] * hq[static_cast<size_t>(i * kStrip + c)];
        }
        const int64_t column = strip * kStrip + c;
        const double factor = apply_factor(tensor.svh[static_cast<size_t>(column)], wanted / power);
        for (int64_t i = 0; i < k; ++i) {
          float& value = decoded[static_cast<size_t>(i * n + column)];
          value = static_cast<float>(value * factor);
        }
      }
    }
  });
}

// Solves ((Q Q^T) o H) r = rowsum(Q o (H W)) for one factor per input row.
void refit_inputs(const float* weight, const std::vector<double>& h, double damping, std::vector<float>& decoded,
                  Exl3Tensor& tensor, ThreadPool& pool) {
  const int64_t k = tensor.k;
  const int64_t n = tensor.n;
  const int64_t n_strips = n / kStrip;
  std::vector<double> partial(static_cast<size_t>(n_strips * k));  // per strip, added in strip order below
  pool.parallel_for(n_strips, 1, [&](int64_t begin, int64_t end) {
    std::vector<double> w(static_cast<size_t>(k * kStrip)), q(w.size()), hw(w.size());
    for (int64_t strip = begin; strip < end; ++strip) {
      load_strip(weight, k, n, strip, w.data());
      load_strip(decoded.data(), k, n, strip, q.data());
      multiply_strip(h.data(), damping, k, w.data(), hw.data());
      for (int64_t i = 0; i < k; ++i) {
        double sum = 0;
        for (int c = 0; c < kStrip; ++c) sum += q[static_cast<size_t>(i * kStrip + c)] * hw[static_cast<size_t>(i * kStrip + c)];
        partial[static_cast<size_t>(strip * k + i)] = sum;
      }
    }
  });
  std::vector<double> r(static_cast<size_t>(k));
  for (int64_t strip = 0; strip < n_strips; ++strip) {
    for (int64_t i = 0; i < k; ++i) r[static_cast<size_t>(i)] += partial[static_cast<size_t>(strip * k + i)];
  }

  std::vector<float> transposed(static_cast<size_t>(k * n));  // [n, k]
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < n; ++j) transposed[static_cast<size_t>(j * k + i)] = decoded[static_cast<size_t>(i * n + j)];
  }
  std::vector<double> system(static_cast<size_t>(k * k));
  pool.parallel_for(k, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      double* row = system.data() + i * k;
      for (int64_t j = 0; j < n; ++j) {
        const double factor = decoded[static_cast<size_t>(i * n + j)];
        const float* column = transposed.data() + j * k;
        for (int64_t m = i; m < k; ++m) row[m] += factor * double{column[m]};
      }
      for (int64_t m = i; m < k; ++m) row[m] *= h[static_cast<size_t>(i * k + m)] + (i == m ? damping : 0.0);
    }
  });
  double mean = 0;
  for (int64_t i = 0; i < k; ++i) mean += system[static_cast<size_t>(i * k + i)] / static_cast<double>(k);
  for (int64_t i = 0; i < k; ++i) system[static_cast<size_t>(i * k + i)] += 1e-6 * mean;
  if (!cholesky_upper(system.data(), k, pool)) return;  // keeps the scales that are there
  solve_cholesky(system.data(), k, r.data());
  for (int64_t i = 0; i < k; ++i) {
    const double factor = apply_factor(tensor.suh[static_cast<size_t>(i)], r[static_cast<size_t>(i)]);
    for (int64_t j = 0; j < n; ++j) {
      float& value = decoded[static_cast<size_t>(i * n + j)];
      value = static_cast<float>(value * factor);
    }
  }
}

}  // namespace

void refit_scales(const float* weight, const std::vector<double>& hessian, double damping, int n_rounds,
                  Exl3Tensor& tensor, ThreadPool& pool) {
  std::vector<float> decoded(static_cast<size_t>(tensor.k * tensor.n));
  decode_weight(tensor.view(), decoded.data(), pool);
  for (int round = 0; round < n_rounds; ++round) {
    refit_outputs(weight, hessian, damping, decoded, tensor, pool);
    refit_inputs(weight, hessian, damping, decoded, tensor, pool);
  }
}

ErrorMeasures measure_error(const float* weight, const float* decoded, int64_t k, int64_t n, const double* hessian,
                            ThreadPool& pool) {
  const int64_t n_strips = n / kStrip;
  struct Sums {
    double error_h = 0, weight_h = 0, error = 0, weight = 0;
  };
  std::vector<Sums> sums(static_cast<size_t>(n_strips));
  pool.parallel_for(n_strips, 1, [&](int64_t begin, int64_t end) {
    std::vector<double> w(static_cast<size_t>(k * kStrip)), e(w.size()), product(w.size());
    for (int64_t strip = begin; strip < end; ++strip) {
      Sums& s = sums[static_cast<size_t>(strip)];
      load_strip(weight, k, n, strip, w.data());
      load_strip(decoded, k, n, strip, e.data());
      for (size_t i = 0; i < e.size(); ++i) {
        e[i] = w[i] - e[i];
        s.error += e[i] * e[i];
        s.weight += w[i] * w[i];
      }
      if (hessian == nullptr) continue;
      multiply_strip(hessian, 0.0, k, e.data(), product.data());
      for (size_t i = 0; i < e.size(); ++i) s.error_h += e[i] * product[i];
      multiply_strip(hessian, 0.0, k, w.data(), product.data());
      for (size_t i = 0; i < w.size(); ++i) s.weight_h += w[i] * product[i];
    }
  });
  Sums total;
  for (const Sums& s : sums) {
    total.error_h += s.error_h;
    total.weight_h += s.weight_h;
    total.error += s.error;
    total.weight += s.weight;
  }
  ErrorMeasures measures;
  measures.relative_mse = total.weight > 0 ? total.error / total.weight : 0.0;
  measures.true_error = hessian == nullptr ? measures.relative_mse
                        : total.weight_h > 0 ? total.error_h / total.weight_h
                                             : 0.0;
  return measures;
}

}  // namespace espalier::codec
