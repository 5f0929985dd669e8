#include "stages/quantize/hessian.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/check.h"
#include "ops/cpu/kernels.h"
#include "ops/parallel.h"

namespace espalier {
namespace {

constexpr int64_t kPanel = ops::kPanelWidth;
constexpr int64_t kStride =
    HessianAccumulator::kChunkRows + 16;  // not a power of two: rows of a block in different cache sets

bool all_finite(const float* x, int64_t n) {
  // x - x is 0 for finite x and NaN otherwise; the sum keeps a NaN.
  float probe = 0;
  for (int64_t i = 0; i < n; ++i) probe += x[i] - x[i];
  return probe == 0;
}

}  // namespace

double Hessian::trace() const {
  double t = 0;
  if (sum.empty()) return t;
  for (int64_t i = 0; i < k; ++i) t += sum[static_cast<size_t>(i * k + i)];
  return t;
}

HessianAccumulator::HessianAccumulator(int64_t k) : padded_((k + kPanel - 1) / kPanel * kPanel) {
  hessian_.k = k;
  hessian_.sum.resize(static_cast<size_t>(k * k));
}

void HessianAccumulator::add(ThreadPool& pool, const float* x, int64_t n_rows, const float* scale) {
  const int64_t k = hessian_.k;
  if (rows_.empty()) {
    rows_.resize(static_cast<size_t>(kChunkRows * k));
    panels_.resize(static_cast<size_t>(padded_ * kChunkRows));
    transposed_.resize(static_cast<size_t>(k * kStride));
    partial_.resize(static_cast<size_t>(k * padded_));
  }
  for (int64_t r = 0; r < n_rows; ++r) {
    const float* row = x + r * k;
    if (!all_finite(row, k)) {
      ++hessian_.dropped;
      continue;
    }
    const float s = scale == nullptr ? 1.0f : scale[r];
    float* kept = rows_.data() + filled_ * k;
    for (int64_t i = 0; i < k; ++i) kept[i] = s * row[i];
    const double w = static_cast<double>(s) * static_cast<double>(s);
    ++hessian_.rows;
    hessian_.weight_sum += w;
    hessian_.weight_square_sum += w * w;
    if (++filled_ == kChunkRows) flush(pool);
  }
}

void HessianAccumulator::flush(ThreadPool& pool) {
  if (filled_ == 0) return;
  const int64_t k = hessian_.k;
  const int64_t n_blocks = padded_ / kPanel;
  ops::for_rows(pool, n_blocks, static_cast<double>(filled_) * kPanel, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t width = std::min(kPanel, k - b * kPanel);
      float* panel = panels_.data() + b * filled_ * kPanel;
      for (int64_t t = 0; t < filled_; ++t) {
        const float* row = rows_.data() + t * k + b * kPanel;
        for (int64_t c = 0; c < kPanel; ++c) panel[t * kPanel + c] = c < width ? row[c] : 0.0f;
        for (int64_t c = 0; c < width; ++c) transposed_[static_cast<size_t>((b * kPanel + c) * kStride + t)] = row[c];
      }
    }
  });
  // Row block b needs columns up to its own diagonal: panels 0 .. b.
  ops::for_rows(pool, n_blocks, static_cast<double>(filled_) * static_cast<double>(k) * 2,
                [&](int64_t begin, int64_t end) {
                  for (int64_t b = begin; b < end; ++b) {
                    ops::MatmulBlock block{};
                    block.x = transposed_.data();
                    block.ldx = kStride;
                    block.panels = panels_.data();
                    block.k = filled_;
                    block.n = padded_;
                    block.y = partial_.data();
                    block.ldy = padded_;
                    block.row_begin = b * kPanel;
                    block.row_end = std::min(k, (b + 1) * kPanel);
                    block.panel_begin = 0;
                    block.panel_end = b + 1;
                    ops::kernels().matmul(block);
                    for (int64_t i = block.row_begin; i < block.row_end; ++i) {
                      double* sum = hessian_.sum.data() + i * k;
                      const float* partial = partial_.data() + i * padded_;
                      for (int64_t j = 0; j <= i; ++j) sum[j] += static_cast<double>(partial[j]);
                    }
                  }
                });
  filled_ = 0;
}

Hessian HessianAccumulator::finish(ThreadPool& pool) {
  flush(pool);
  const int64_t k = hessian_.k;
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < i; ++j)
      hessian_.sum[static_cast<size_t>(j * k + i)] = hessian_.sum[static_cast<size_t>(i * k + j)];
  }
  Hessian out = std::move(hessian_);
  hessian_ = Hessian();
  hessian_.k = k;
  hessian_.sum.resize(static_cast<size_t>(k * k));
  return out;
}

double default_damping(double effective_rows, int64_t k) {
  constexpr double kLeast = 0.025;
  constexpr double kMost = 1.0;
  if (!(effective_rows > 0)) return kMost;
  return std::clamp(2.0 * static_cast<double>(k) / effective_rows, kLeast, kMost);
}

HessianPrior make_prior(const Hessian& all_tokens) {
  HessianPrior prior;
  if (all_tokens.weight_sum <= 0) return prior;
  prior.mean = all_tokens.sum;
  for (double& v : prior.mean) v /= all_tokens.weight_sum;
  prior.trace = all_tokens.trace() / all_tokens.weight_sum;
  return prior;
}

BlendedHessian blend_with_prior(Hessian hessian, const HessianPrior& prior, double n0) {
  BlendedHessian out;
  out.values = std::move(hessian.sum);
  if (prior.mean.empty() || n0 <= 0) return out;
  CHECK(prior.mean.size() == out.values.size()) << "prior of another size";
  const double n_e = hessian.effective_rows();
  double trace = 0;
  for (int64_t i = 0; i < hessian.k; ++i) trace += out.values[static_cast<size_t>(i * hessian.k + i)];
  const bool routed = n_e > 0 && hessian.weight_sum > 0;
  const double s = routed && prior.trace > 0 ? trace / hessian.weight_sum / prior.trace : 1.0;
  const double own = routed ? n_e / hessian.weight_sum / (n_e + n0) : 0.0;
  const double other = n0 * s / (n_e + n0);
  for (size_t i = 0; i < out.values.size(); ++i) out.values[i] = own * out.values[i] + other * prior.mean[i];
  out.prior_fraction = n0 / (n_e + n0);
  return out;
}

}  // namespace espalier
