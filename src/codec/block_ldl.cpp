#include "codec/block_ldl.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "codec/strip_product.h"
#include "codec/trellis.h"

namespace espalier::codec {
namespace {

constexpr int64_t kPanel = 64;

// Rows [start, stop) of U between columns [begin, end), which lie right of the panel's own block: forward substitution.
void solve_panel_columns(double* a, int64_t n, int64_t start, int64_t stop, int64_t begin, int64_t end) {
  for (int64_t p = start; p < stop; ++p) {
    double* row = a + p * n;
    const double root = row[p];
    for (int64_t j = begin; j < end; ++j) row[j] /= root;
    for (int64_t i = p + 1; i < stop; ++i) {
      const double factor = row[i];
      double* target = a + i * n;
      for (int64_t j = begin; j < end; ++j) target[j] -= factor * row[j];
    }
  }
}

bool factor_panel_block(double* a, int64_t n, int64_t start, int64_t stop) {
  for (int64_t p = start; p < stop; ++p) {
    double* row = a + p * n;
    const double pivot = row[p];
    if (!(pivot > 0) || !std::isfinite(pivot)) return false;
    const double root = std::sqrt(pivot);
    row[p] = root;
    for (int64_t j = p + 1; j < stop; ++j) row[j] /= root;
    for (int64_t i = p + 1; i < stop; ++i) {
      for (int64_t j = i; j < stop; ++j) a[i * n + j] -= row[i] * row[j];
    }
  }
  return true;
}

}  // namespace

bool cholesky_upper(double* a, int64_t n, ThreadPool& pool, SimdTier tier) {
  CHECK(n % kStripWidth == 0) << n << " rows";
  std::vector<double> negated(static_cast<size_t>(n * kPanel));  // -U of the panel, transposed: [n, panel rows]
  for (int64_t start = 0; start < n; start += kPanel) {
    const int64_t stop = std::min(start + kPanel, n);
    const int64_t height = stop - start;
    if (!factor_panel_block(a, n, start, stop)) return false;
    const int64_t n_strips = (n - stop) / kStripWidth;
    pool.parallel_for(n_strips, 8, [&](int64_t begin, int64_t end) {
      const int64_t first = stop + begin * kStripWidth;
      const int64_t last = stop + end * kStripWidth;
      solve_panel_columns(a, n, start, stop, first, last);
      for (int64_t j = first; j < last; ++j) {
        for (int64_t p = start; p < stop; ++p) negated[static_cast<size_t>(j * kPanel + p - start)] = -a[p * n + j];
      }
    });
    pool.parallel_for(n_strips, 4, [&](int64_t begin, int64_t end) {
      double strip[kPanel * kStripWidth];
      for (int64_t s = begin; s < end; ++s) {
        const int64_t column = stop + s * kStripWidth;
        for (int64_t p = 0; p < height; ++p) {
          std::memcpy(strip + p * kStripWidth, a + (start + p) * n + column, kStripWidth * sizeof(double));
        }
        StripProduct update;
        update.a = negated.data() + stop * kPanel;
        update.a_stride = kPanel;
        update.strip = strip;
        update.out = a + stop * n + column;
        update.out_stride = n;
        update.rows = column + kStripWidth - stop;  // down to the diagonal block
        update.cols = height;
        update.add = true;
        strip_product(update, tier);
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
  std::vector<double> feedback(static_cast<size_t>(n * n));
  pool.parallel_for(n / kTile, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      // Row s of C is column s of U; x C_bb = C[s, block] for lower triangular C_bb, from the last entry back, all s at
      // once.
      const int64_t first = b * kTile;
      const int64_t below = first + kTile;
      for (int j = kTile - 1; j >= 0; --j) {
        double* x = feedback.data() + (first + j) * n;
        const double* u = upper + (first + j) * n;
        std::copy(u + below, u + n, x + below);
        for (int m = j + 1; m < kTile; ++m) {
          const double* known = feedback.data() + (first + m) * n;
          const double factor = u[first + m];
          for (int64_t s = below; s < n; ++s) x[s] -= known[s] * factor;
        }
        for (int64_t s = below; s < n; ++s) x[s] /= u[first + j];
      }
    }
  });
  return feedback;
}

}  // namespace espalier::codec
