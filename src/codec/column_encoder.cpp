#include "codec/column_encoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "codec/strip_product.h"

namespace espalier::codec {
namespace {

static_assert(kStripWidth == kTile);

// Targets beyond this cannot be told apart by any codebook; the bound keeps the search's arithmetic finite.
constexpr double kMostTarget = 1e6;
// Of the largest eigenvalue; below 1 because a full step overshoots less often than a short one stops early.
constexpr double kRelaxation = 0.6;

// out [16, 16] (+)= a [16, cols] times strip [cols, 16].
void multiply(const double* a, int64_t a_stride, int64_t cols, const double* strip, double* out, SimdTier tier) {
  StripProduct product;
  product.a = a;
  product.a_stride = a_stride;
  product.strip = strip;
  product.out = out;
  product.rows = kTile;
  product.cols = cols;
  strip_product(product, tier);
}

double dot(const double* a, const double* b) {
  double sum = 0;
  for (int e = 0; e < kTileSize; ++e) sum += a[e] * b[e];
  return sum;
}

class Work {
 public:
  Work(const ColumnProblem& problem, Exl3Tensor& tensor)
      : p_(problem),
        tensor_(tensor),
        tier_(problem.search.tier),
        values_(codebook_table_f32(problem.search.codebook)),
        error_(static_cast<size_t>(problem.k * problem.width)),
        states_(static_cast<size_t>(problem.k * problem.width)) {
    if (p_.output == nullptr) return;
    corrected_.resize(error_.size());
    output_feedback_ = strips_of(p_.output->feedback, true);
    if (p_.descent_sweeps > 0) output_metric_ = strips_of(p_.output->metric, false);
  }

  int64_t n_blocks() const { return p_.k / kTile; }
  int64_t n_strips() const { return p_.width / kTile; }

  void encode_tile(int64_t b, int64_t s) {
    const int64_t below = (b + 1) * kTile;
    double inner[kTileSize];  // P
    multiply(p_.input->feedback.data() + b * kTile * p_.k + below, p_.k, p_.k - below, strip_error(s) + below * kTile,
             inner, tier_);
    double target[kTileSize];
    for (int e = 0; e < kTileSize; ++e) target[e] = weight(b, s, e) + inner[e];
    if (p_.output != nullptr) {
      const int64_t right = (s + 1) * kTile;
      double outer[kTileSize];  // (E + P) M
      multiply(corrected_.data() + b * kTile * p_.width + right, p_.width, p_.width - right,
               output_feedback_.data() + (s * p_.width + right) * kTile, outer, tier_);
      for (int e = 0; e < kTileSize; ++e) target[e] += outer[e];
    }
    search(target, states(b, s));
    set_error(b, s);
    if (p_.output == nullptr) return;
    const double* error = strip_error(s) + b * kTileSize;
    for (int e = 0; e < kTileSize; ++e) {
      corrected_[static_cast<size_t>((b * kTile + e / kTile) * p_.width + s * kTile + e % kTile)] = error[e] + inner[e];
    }
  }

  // One sweep over all tiles, last row block first.
  void descend() {
    std::vector<double> row(static_cast<size_t>(kTile * p_.width));  // (H E)_b, [16, width]
    for (int64_t b = n_blocks() - 1; b >= 0; --b) {
      const double* hessian = p_.input->metric.data() + b * kTile * p_.k;
      for (int64_t s = 0; s < n_strips(); ++s) {
        StripProduct product;
        product.a = hessian;
        product.a_stride = p_.k;
        product.strip = strip_error(s);
        product.out = row.data() + s * kTile;
        product.out_stride = p_.width;
        product.rows = kTile;
        product.cols = p_.k;
        strip_product(product, tier_);
      }
      for (int64_t s = n_strips() - 1; s >= 0; --s) descend_tile(b, s, row);
    }
  }

  void store() const {
    const int64_t n_words = tile_words(tensor_.k2);
    for (int64_t b = 0; b < n_blocks(); ++b) {
      for (int64_t s = 0; s < n_strips(); ++s) {
        const int64_t tile = b * (p_.n / kTile) + p_.first / kTile + s;
        pack_tile(states_.data() + (b * n_strips() + s) * kTileSize, tensor_.k2,
                  tensor_.trellis.data() + tile * n_words);
      }
    }
  }

 private:
  // [width, width] -> strips of 16 columns, [width/16][width, 16]; of the transpose when `transposed`.
  std::vector<double> strips_of(const std::vector<double>& a, bool transposed) const {
    std::vector<double> out(a.size());
    const int64_t w = p_.width;
    for (int64_t i = 0; i < w; ++i) {
      for (int64_t j = 0; j < w; ++j) {
        const int64_t r = transposed ? j : i;
        const int64_t c = transposed ? i : j;
        out[static_cast<size_t>(c / kTile * w * kTile + r * kTile + c % kTile)] = a[static_cast<size_t>(i * w + j)];
      }
    }
    return out;
  }

  // Row-major element e of tile (b, s).
  double weight(int64_t b, int64_t s, int e) const {
    return p_.weight[(b * kTile + e / kTile) * p_.n + p_.first + s * kTile + e % kTile];
  }
  uint16_t* states(int64_t b, int64_t s) { return states_.data() + (b * n_strips() + s) * kTileSize; }
  double* strip_error(int64_t s) { return error_.data() + s * p_.k * kTile; }

  void search(const double* target, uint16_t* states) const {
    const uint8_t* to_row_major = ring_to_row_major();
    float ring[kTileSize];
    for (int p = 0; p < kTileSize; ++p) {
      ring[p] = static_cast<float>(std::clamp(target[to_row_major[p]], -kMostTarget, kMostTarget));
    }
    search_tile(ring, p_.search, states);
  }

  void set_error(int64_t b, int64_t s) {
    const uint8_t* to_row_major = ring_to_row_major();
    const uint16_t* found = states(b, s);
    double* error = strip_error(s) + b * kTileSize;
    for (int p = 0; p < kTileSize; ++p) {
      const int e = to_row_major[p];
      error[e] = weight(b, s, e) - double{values_[found[p]]};
    }
  }

  // out = H_bb x G_ss.
  void weigh(int64_t b, int64_t s, const double* x, double* out) const {
    const double* hessian = p_.input->metric.data() + b * kTile * p_.k + b * kTile;
    if (p_.output == nullptr) return multiply(hessian, p_.k, kTile, x, out, tier_);
    double half[kTileSize];
    multiply(hessian, p_.k, kTile, x, half, tier_);
    multiply(half, kTile, kTile, output_metric_.data() + (s * p_.width + s * kTile) * kTile, out, tier_);
  }

  void descend_tile(int64_t b, int64_t s, std::vector<double>& row) {
    double gradient[kTileSize];  // R
    if (p_.output == nullptr) {
      for (int i = 0; i < kTile; ++i)
        std::memcpy(gradient + i * kTile, row.data() + i * p_.width + s * kTile, kTile * sizeof(double));
    } else {
      multiply(row.data(), p_.width, p_.width, output_metric_.data() + s * p_.width * kTile, gradient, tier_);
    }
    double away[kTileSize];  // T - Q
    multiply(p_.input->inverse.data() + b * kTileSize, kTile, kTile, gradient, away, tier_);
    if (p_.output != nullptr) {
      double half[kTileSize];
      std::memcpy(half, away, sizeof half);
      multiply(half, kTile, kTile, p_.output->inverse.data() + s * kTileSize, away, tier_);
    }
    double cost = dot(away, gradient);
    double best[kTileSize];  // T
    double before[kTileSize];
    std::memcpy(before, strip_error(s) + b * kTileSize, sizeof before);
    for (int e = 0; e < kTileSize; ++e) best[e] = weight(b, s, e) - before[e] + away[e];
    cost = consider(b, s, best, best, cost);

    double step = 1.0 / (kRelaxation * p_.input->largest[static_cast<size_t>(b)]);
    if (p_.output != nullptr) step /= p_.output->largest[static_cast<size_t>(s)];
    double towards[kTileSize];
    const double* error = strip_error(s) + b * kTileSize;
    for (int e = 0; e < kTileSize; ++e) away[e] = best[e] - (weight(b, s, e) - error[e]);
    weigh(b, s, away, towards);
    for (int e = 0; e < kTileSize; ++e) towards[e] = weight(b, s, e) - error[e] + towards[e] * step;
    consider(b, s, best, towards, cost);

    // (H E)_b follows what changed.
    double change[kTileSize], of_row[kTileSize];
    for (int e = 0; e < kTileSize; ++e) change[e] = error[e] - before[e];
    multiply(p_.input->metric.data() + b * kTile * p_.k + b * kTile, p_.k, kTile, change, of_row, tier_);
    for (int e = 0; e < kTileSize; ++e)
      row[static_cast<size_t>(e / kTile * p_.width + s * kTile + e % kTile)] += of_row[e];
  }

  // Searches `target` and takes the result when it costs less than `cost` seen from `best`; returns the cost that then
  // holds.
  double consider(int64_t b, int64_t s, const double* best, const double* target, double cost) {
    uint16_t found[kTileSize];
    search(target, found);
    const uint8_t* to_row_major = ring_to_row_major();
    double away[kTileSize], weighted[kTileSize];
    for (int p = 0; p < kTileSize; ++p) away[to_row_major[p]] = best[to_row_major[p]] - double{values_[found[p]]};
    weigh(b, s, away, weighted);
    const double candidate = dot(away, weighted);
    if (!(candidate < cost)) return cost;
    std::memcpy(states(b, s), found, sizeof found);
    set_error(b, s);
    return candidate;
  }

  const ColumnProblem& p_;
  Exl3Tensor& tensor_;
  const SimdTier tier_;
  const float* values_;
  std::vector<double> error_;                            // strips of [k, 16]: weight minus content
  std::vector<uint16_t> states_;                         // [k/16, width/16, 256] in ring order
  std::vector<double> corrected_;                        // [k, width]: E + P
  std::vector<double> output_feedback_, output_metric_;  // strips
};

// a [16, 16] := its inverse, by Gauss-Jordan without exchange of rows: a is positive definite.
void invert(double* a) {
  for (int p = 0; p < kTile; ++p) {
    const double pivot = 1.0 / a[p * kTile + p];
    for (int j = 0; j < kTile; ++j) a[p * kTile + j] *= pivot;
    a[p * kTile + p] = pivot;
    for (int i = 0; i < kTile; ++i) {
      if (i == p) continue;
      const double factor = a[i * kTile + p];
      a[i * kTile + p] = 0;
      for (int j = 0; j < kTile; ++j) a[i * kTile + j] -= factor * a[p * kTile + j];
    }
  }
}

// Largest eigenvalue of a symmetric positive definite 16x16 block: trace(a^64)^(1/64), at most 4 % too large. By
// squaring and square roots, which round the same everywhere.
double largest_eigenvalue(const double* block) {
  double a[kTileSize];
  double scale = 0;
  for (int i = 0; i < kTile; ++i) scale += block[i * kTile + i];
  for (int e = 0; e < kTileSize; ++e) a[e] = block[e] / scale;
  double traces[6];
  for (double& trace : traces) {
    double square[kTileSize] = {};
    for (int i = 0; i < kTile; ++i) {
      for (int m = 0; m < kTile; ++m) {
        for (int j = 0; j < kTile; ++j) square[i * kTile + j] += a[i * kTile + m] * a[m * kTile + j];
      }
    }
    trace = 0;
    for (int i = 0; i < kTile; ++i) trace += square[i * kTile + i];
    for (int e = 0; e < kTileSize; ++e) a[e] = square[e] / trace;
  }
  double root = 1;
  for (int round = 5; round >= 0; --round) root = std::sqrt(traces[round] * root);
  return scale * root;
}

}  // namespace

void prepare_descent(SideMetric* side) {
  side->inverse.resize(static_cast<size_t>(side->size * kTile));
  side->largest.resize(static_cast<size_t>(side->size / kTile));
  for (int64_t b = 0; b < side->size / kTile; ++b) {
    double* block = side->inverse.data() + b * kTileSize;
    for (int e = 0; e < kTileSize; ++e) {
      block[e] = side->metric[static_cast<size_t>((b * kTile + e / kTile) * side->size + b * kTile + e % kTile)];
    }
    side->largest[static_cast<size_t>(b)] = largest_eigenvalue(block);
    invert(block);
  }
}

void encode_columns(const ColumnProblem& problem, Exl3Tensor& tensor, ThreadPool& pool) {
  Work work(problem, tensor);
  const int64_t n_blocks = work.n_blocks();
  const int64_t n_strips = work.n_strips();
  for (int64_t diagonal = 0; diagonal < n_blocks + n_strips - 1; ++diagonal) {
    const int64_t first = std::max<int64_t>(0, diagonal - (n_strips - 1));
    const int64_t last = std::min(diagonal, n_blocks - 1);
    pool.parallel_for(last - first + 1, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = first + begin; i < first + end; ++i)
        work.encode_tile(n_blocks - 1 - i, n_strips - 1 - (diagonal - i));
    });
  }
  for (int sweep = 0; sweep < problem.descent_sweeps; ++sweep) work.descend();
  work.store();
}

}  // namespace espalier::codec
