#include "bench/peer/exllamav3_hessian.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "codec/hadamard.h"
#include "codec/trellis.h"

namespace espalier::peer {
namespace {

using codec::kTile;

// Lower C with a = C C^T, in place; false when a pivot is not positive.
bool cholesky(std::vector<double>& a, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    double* row = a.data() + i * n;
    for (int64_t j = 0; j <= i; ++j) {
      const double* other = a.data() + j * n;
      double sum = row[j];
      for (int64_t m = 0; m < j; ++m) sum -= row[m] * other[m];
      if (i != j) {
        row[j] = sum / other[j];
      } else {
        if (!(sum > 0) || !std::isfinite(sum)) return false;
        row[i] = std::sqrt(sum);
      }
    }
    std::fill(row + i + 1, row + n, 0.0);
  }
  return true;
}

// L[:, block] = C[:, block] inv(C[block, block]) below the diagonal blocks, zero elsewhere.
std::vector<double> block_ldl(const std::vector<double>& c, int64_t n) {
  std::vector<double> out(c.size());
  for (int64_t first = 0; first < n; first += kTile) {
    for (int64_t r = first + kTile; r < n; ++r) {
      double* x = out.data() + r * n + first;  // x C_bb = C[r, block]
      for (int64_t j = kTile - 1; j >= 0; --j) {
        double sum = c[static_cast<size_t>(r * n + first + j)];
        for (int64_t m = j + 1; m < kTile; ++m) sum -= x[m] * c[static_cast<size_t>((first + m) * n + first + j)];
        x[j] = sum / c[static_cast<size_t>((first + j) * n + first + j)];
      }
    }
  }
  return out;
}

double mean_diagonal(const std::vector<double>& h, int64_t k) {
  double sum = 0;
  for (int64_t i = 0; i < k; ++i) sum += h[static_cast<size_t>(i * k + i)];
  return sum / static_cast<double>(k);
}

void add_to_diagonal(std::vector<double>& h, int64_t k, double amount) {
  for (int64_t i = 0; i < k; ++i) h[static_cast<size_t>(i * k + i)] += amount;
}

}  // namespace

PreparedHessian prepare_hessian(const double* hessian, int64_t k, const std::vector<float>& signs, double damping) {
  PreparedHessian out;
  if (hessian == nullptr) return out;
  out.damped.assign(hessian, hessian + k * k);
  const double mean = mean_diagonal(out.damped, k);
  if (!std::isfinite(mean) || mean < 1e-20) return PreparedHessian();
  out.is_fallback = false;
  add_to_diagonal(out.damped, k, damping * mean);
  for (int64_t i = 0; i < k; ++i) out.diagonal.push_back(out.damped[static_cast<size_t>(i * k + i)]);
  out.rotated = out.damped;
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < k; ++j) {
      out.rotated[static_cast<size_t>(i * k + j)] *=
          double{signs[static_cast<size_t>(i)]} * double{signs[static_cast<size_t>(j)]};
    }
  }
  codec::hadamard_along_rows(out.rotated.data(), k, k);
  codec::hadamard_along_columns(out.rotated.data(), k, k);
  out.damping = damping;
  std::vector<double> factor = out.rotated;
  for (int attempt = 0; !cholesky(factor, k); ++attempt) {
    CHECK(attempt < 10) << "Hessian is not positive definite";
    add_to_diagonal(out.rotated, k, 2 * damping * mean_diagonal(out.rotated, k));
    out.damping += 2 * damping;
    factor = out.rotated;
  }
  out.feedback = block_ldl(factor, k);
  return out;
}

bool solve_spd(std::vector<double>& a, int64_t n, std::vector<double>& x) {
  if (!cholesky(a, n)) return false;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < i; ++j)
      x[static_cast<size_t>(i)] -= a[static_cast<size_t>(i * n + j)] * x[static_cast<size_t>(j)];
    x[static_cast<size_t>(i)] /= a[static_cast<size_t>(i * n + i)];
  }
  for (int64_t i = n - 1; i >= 0; --i) {
    x[static_cast<size_t>(i)] /= a[static_cast<size_t>(i * n + i)];
    for (int64_t j = 0; j < i; ++j)
      x[static_cast<size_t>(j)] -= a[static_cast<size_t>(i * n + j)] * x[static_cast<size_t>(i)];
  }
  return true;
}

}  // namespace espalier::peer
