#include "bench/peer/exllamav3_refit.h"

#include <algorithm>
#include <cmath>

#include "codec/hadamard.h"

namespace espalier::peer {
namespace {

size_t at(int64_t i) {
  return static_cast<size_t>(i);
}

// a [k, k] * b [k, n], each element one chain over ascending inner index.
std::vector<double> multiply(const std::vector<double>& a, const std::vector<double>& b, int64_t k, int64_t n) {
  std::vector<double> out(at(k * n));
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t m = 0; m < k; ++m) {
      const double factor = a[at(i * k + m)];
      for (int64_t j = 0; j < n; ++j) out[at(i * n + j)] += factor * b[at(m * n + j)];
    }
  }
  return out;
}

double inner_product(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

double usable(double factor) {
  return std::isfinite(factor) && factor > 0 ? factor : 1.0;
}

}  // namespace

double proxy_error(const std::vector<float>& weight_r, const std::vector<double>& error, int64_t k, int64_t n,
                   const PreparedHessian& hessian) {
  if (hessian.is_fallback) return inner_product(error, error) / static_cast<double>(k * n);
  const std::vector<double> w(weight_r.begin(), weight_r.end());
  return inner_product(error, multiply(hessian.rotated, error, k, n)) /
         std::max(inner_product(w, multiply(hessian.rotated, w, k, n)), 1e-8);
}

void refit_scales(const float* weight, const std::vector<float>& inner, int64_t k, int64_t n,
                  const std::vector<double>& hessian, std::vector<float>& su, std::vector<float>& sv) {
  const std::vector<double> w(weight, weight + k * n);
  const std::vector<double> hw = multiply(hessian, w, k, n);
  std::vector<double> q(inner.begin(), inner.end());
  codec::hadamard_along_rows(q.data(), k, n);
  codec::hadamard_along_columns(q.data(), k, n);
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < n; ++j) q[at(i * n + j)] *= double{su[at(i)]} * double{sv[at(j)]};
  }
  for (int round = 0; round < 2; ++round) {
    const std::vector<double> hq = multiply(hessian, q, k, n);
    for (int64_t j = 0; j < n; ++j) {
      double above = 0, below = 0;
      for (int64_t i = 0; i < k; ++i) {
        above += q[at(i * n + j)] * hw[at(i * n + j)];
        below += q[at(i * n + j)] * hq[at(i * n + j)];
      }
      const double factor = usable(above / below);
      sv[at(j)] = static_cast<float>(sv[at(j)] * factor);
      for (int64_t i = 0; i < k; ++i) q[at(i * n + j)] *= factor;
    }
    std::vector<double> system(at(k * k)), r(at(k));
    double mean = 0;
    for (int64_t a = 0; a < k; ++a) {
      for (int64_t b = 0; b <= a; ++b) {
        double sum = 0;
        for (int64_t j = 0; j < n; ++j) sum += q[at(a * n + j)] * q[at(b * n + j)];
        system[at(a * k + b)] = system[at(b * k + a)] = sum * hessian[at(a * k + b)];
      }
      mean += system[at(a * k + a)] / static_cast<double>(k);
      for (int64_t j = 0; j < n; ++j) r[at(a)] += q[at(a * n + j)] * hw[at(a * n + j)];
    }
    for (int64_t a = 0; a < k; ++a) system[at(a * k + a)] += 1e-6 * mean;
    if (!solve_spd(system, k, r)) return;
    for (int64_t i = 0; i < k; ++i) {
      const double factor = usable(r[at(i)]);
      su[at(i)] = static_cast<float>(su[at(i)] * factor);
      for (int64_t j = 0; j < n; ++j) q[at(i * n + j)] *= factor;
    }
  }
}

}  // namespace espalier::peer
