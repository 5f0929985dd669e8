#include "codec/block_ldl.h"

#include <algorithm>
#include <cmath>

#include "codec/trellis.h"

namespace espalier::codec {
namespace {

constexpr int64_t kPanel = 64;

}  // namespace

bool cholesky_upper(double* a, int64_t n, ThreadPool& pool) {
  for (int64_t start = 0; start < n; start += kPanel) {
    const int64_t stop = std::min(start + kPanel, n);
    for (int64_t p = start; p < stop; ++p) {
      double* row = a + p * n;
      const double pivot = row[p];
      if (!(pivot > 0) || !std::isfinite(pivot)) return false;
      const double root = std::sqrt(pivot);
      row[p] = root;
      for (int64_t j = p + 1; j < n; ++j) row[j] /= root;
      for (int64_t i = p + 1; i < stop; ++i) {
        const double factor = row[i];
        double* target = a + i * n;
        for (int64_t j = i; j < n; ++j) target[j] -= factor * row[j];
      }
    }
    pool.parallel_for(n - stop, 8, [&](int64_t begin, int64_t end) {
      for (int64_t i = stop + begin; i < stop + end; ++i) {
        double* target = a + i * n;
        for (int64_t p = start; p < stop; ++p) {
          const double* row = a + p * n;
          const double factor = row[i];
          for (int64_t j = i; j < n; ++j) target[j] -= factor * row[j];
        }
      }
    });
  }
  return true;
}

void solve_cholesky(const double* upper, int64_t n, double* x) {
  for (int64_t p = 0; p < n; ++p) {  // U^T y = x, forward
    x[p] /= upper[p * n + p];
    for (int64_t j = p + 1; j < n; ++j) x[j] -= upper[p * n + j] * x[p];
  }
  for (int64_t p = n - 1; p >= 0; --p) {  // U x = y, backward
    double sum = x[p];
    for (int64_t j = p + 1; j < n; ++j) sum -= upper[p * n + j] * x[j];
    x[p] = sum / upper[p * n + p];
  }
}

std::vector<double> block_ldl_feedback(const double* upper, int64_t n, ThreadPool& pool) {
  const int64_t n_blocks = n / kTile;
  std::vector<double> feedback(static_cast<size_t>(n_blocks * n * kTile));
  pool.parallel_for(n_blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first = b * kTile;
      for (int64_t r = first + kTile; r < n; ++r) {
        // Row r of C is column r of U; x C_bb = C[r, block] for lower triangular C_bb, from the last entry back.
        double* x = feedback.data() + (b * n + r) * kTile;
        for (int j = kTile - 1; j >= 0; --j) {
          double sum = upper[(first + j) * n + r];
          for (int m = j + 1; m < kTile; ++m) sum -= x[m] * upper[(first + j) * n + first + m];
          x[j] = sum / upper[(first + j) * n + first + j];
        }
      }
    }
  });
  return feedback;
}

}  // namespace espalier::codec
