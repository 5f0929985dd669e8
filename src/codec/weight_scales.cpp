#include "codec/weight_scales.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "base/rng.h"
#include "codec/trellis.h"
#include "ops/scalar_math.h"
#include "tensor/float_formats.h"

namespace espalier::codec {
namespace {

// rms per row of the columns' rescaled weights.
std::vector<double> row_rms(const float* weight, int64_t k, int64_t n, const std::vector<double>& inverse_sv) {
  std::vector<double> rms(static_cast<size_t>(k));
  for (int64_t i = 0; i < k; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < n; ++j) {
      const double v = double{weight[i * n + j]} * inverse_sv[static_cast<size_t>(j)];
      sum += v * v;
    }
    rms[static_cast<size_t>(i)] = std::sqrt(sum / static_cast<double>(n));
  }
  return rms;
}

std::vector<double> column_rms(const float* weight, int64_t k, int64_t n, const std::vector<double>& inverse_su) {
  std::vector<double> sums(static_cast<size_t>(n));
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      const double v = double{weight[i * n + j]} * inverse_su[static_cast<size_t>(i)];
      sums[static_cast<size_t>(j)] += v * v;
    }
  }
  for (double& s : sums) s = std::sqrt(s / static_cast<double>(k));
  return sums;
}

std::vector<double> inverse(const std::vector<double>& v) {
  std::vector<double> out(v.size());
  for (size_t i = 0; i < v.size(); ++i) out[i] = v[i] > 0 ? 1.0 / v[i] : 0.0;
  return out;
}

// Multiplies each block of `scale` by the rms that the block's rescaled weights have, which makes that rms 1.
// `residual[i]` is the rms of row (or column) i before its own scale.
void normalise(std::vector<double>& scale, const std::vector<double>& residual, size_t block_size) {
  for (size_t block = 0; block < scale.size(); block += block_size) {
    double sum = 0;
    int64_t n_used = 0;
    for (size_t i = block; i < block + block_size; ++i) {
      if (scale[i] <= 0) continue;
      const double v = residual[i] / scale[i];
      sum += v * v;
      ++n_used;
    }
    if (n_used == 0 || !(sum > 0)) continue;
    const double rms = std::sqrt(sum / static_cast<double>(block_size));
    for (size_t i = block; i < block + block_size; ++i) scale[i] *= rms;
  }
}

struct Range {
  double low = 0;  // least positive entry; 0 when there is none
  double high = 0;
};

Range positive_range(const std::vector<double>& v) {
  Range r;
  for (double x : v) {
    if (x <= 0) continue;
    r.low = r.low == 0 ? x : std::min(r.low, x);
    r.high = std::max(r.high, x);
  }
  return r;
}

// Exponent p for su * 2^p, sv * 2^-p: the smallest move that brings both well inside fp16's normal range; when none
// does, the one that keeps most of the small scales among those with which the large ones fit, else the one with the
// least excess.
int balancing_exponent(const Range& su, const Range& sv) {
  constexpr int kMost = 200;
  int best = 0;
  double best_low = -1e300, best_high = 1e300;
  for (int step = 0; step <= 2 * kMost; ++step) {
    const int p = step % 2 == 0 ? step / 2 : -(step / 2 + 1);
    const double low = std::min(std::log2(su.low) + p, std::log2(sv.low) - p);
    double high = std::max(std::log2(su.high) + p, std::log2(sv.high) - p);
    if (low >= -12 && high <= 12) return p;
    high = std::max(high, 15.0);  // below that all fit alike
    if (high < best_high || (high == best_high && low > best_low)) {
      best_high = high;
      best_low = low;
      best = p;
    }
  }
  return best;
}

// A row without weights costs nothing, but a zero in the rotated Hessian would let feedback push errors there without
// limit.
void fill_gaps(std::vector<double>& scale) {
  const double least = positive_range(scale).low;
  for (size_t block = 0; block < scale.size(); block += kBlock) {
    const Range r =
        positive_range({scale.begin() + static_cast<long>(block), scale.begin() + static_cast<long>(block + kBlock)});
    for (size_t i = block; i < block + kBlock; ++i) {
      if (scale[i] <= 0) scale[i] = r.low > 0 ? r.low : least;
    }
  }
}

}  // namespace

double best_spread(Codebook codebook, int k2) {
  // Rows: 3inst, mcg, mul1; columns: K = 1..8, found on Gaussian tiles. A search per matrix is not made: on the golden
  // cases factors from 0.94 to 1.00 of these change the error by less than 1 %, and 1.03 costs 1.5 %.
  static constexpr std::array<std::array<double, 8>, 3> kSpread = {{
      {1.3681, 1.2450, 1.1815, 1.1518, 1.0801, 1.0514, 1.0316, 1.0048},
      {1.4054, 1.2437, 1.1818, 1.1666, 1.1193, 1.0537, 1.0302, 0.9934},
      {1.1249, 0.9972, 0.9453, 0.9200, 0.8850, 0.8700, 0.8600, 0.8200},
  }};
  static constexpr std::array<double, 8> kDrift = {1.08, 1.03, 1.02, 1.02, 1.02, 1.02, 1.02, 1.03};
  static constexpr std::array<double, 3> kHalfSpread = {1.03, 0.965, 0.92};  // mul1 at K = 1.5, 2.5, 3.5
  static constexpr std::array<double, 3> kHalfDrift = {1.05, 1.025, 1.02};
  if (k2 % 2 != 0) return kHalfSpread[static_cast<size_t>(k2 / 2 - 1)] / kHalfDrift[static_cast<size_t>(k2 / 2 - 1)];
  const size_t column = static_cast<size_t>(k2 / 2 - 1);
  return kSpread[static_cast<size_t>(codebook)][column] / kDrift[column];
}

Result<WeightScales> choose_scales(const ScaleRequest& request) {
  const float* weight = request.weight;
  const int64_t k = request.k;
  const int64_t n = request.n;
  ScaleRule rule = request.rule;
  if (rule.column_weight < 0) rule.column_weight = request.two_sided ? 0.75 : 0.5;
  if (rule.column_metric < 0) rule.column_metric = request.two_sided ? 0.125 : 0.25;
  WeightScales scales;
  std::vector<double> sv = column_rms(weight, k, n, std::vector<double>(static_cast<size_t>(k), 1.0));
  if (positive_range(sv).high == 0) {
    scales.is_zero = true;
    scales.n_zero_rows = k;
    scales.n_zero_columns = n;
    scales.suh.assign(static_cast<size_t>(k), 0);
    scales.svh.assign(static_cast<size_t>(n), 0);
    return scales;
  }
  for (size_t j = 0; j < sv.size(); ++j) {
    if (sv[j] <= 0) continue;
    sv[j] = ops::pow_d(sv[j], rule.column_weight);
    if (request.output_diagonal != nullptr) sv[j] *= ops::pow_d(request.output_diagonal[j], -rule.column_metric);
  }
  double mean = 0;
  for (double s : sv) mean += s;
  mean /= static_cast<double>(n);
  for (double& s : sv) s /= mean;

  std::vector<double> su = row_rms(weight, k, n, inverse(sv));
  for (size_t i = 0; i < su.size(); ++i) {
    if (su[i] > 0) su[i] = ops::pow_d(su[i], rule.row_weight) * ops::pow_d(request.diagonal[i], -rule.row_hessian);
  }
  for (int round = 0; round < 2; ++round) {
    normalise(sv, column_rms(weight, k, n, inverse(su)), rule.normalise_blocks ? kBlock : sv.size());
    normalise(su, row_rms(weight, k, n, inverse(sv)), rule.normalise_blocks ? kBlock : su.size());
  }
  for (double& s : su) s /= request.spread;

  const int exponent = balancing_exponent(positive_range(su), positive_range(sv));
  const CounterRng su_signs(request.seed, request.name + ".suh");
  const CounterRng sv_signs(request.seed, request.name + ".svh");
  const auto round_scales = [&](std::vector<double>& values, int shift, const CounterRng& signs, const char* side,
                                std::vector<uint16_t>& out, int64_t& n_zero, int64_t& n_lost,
                                int64_t& first_lost) -> Status {
    out.resize(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      const double shifted = std::ldexp(values[i], shift);
      if (!(shifted <= 65504.0)) {
        int64_t at = 0;
        for (int64_t e = 1; e < k * n; ++e) at = std::fabs(weight[e]) > std::fabs(weight[at]) ? e : at;
        char text[128];
        std::snprintf(text, sizeof text, "%s %zu needs %.4g, at most 65504; the largest weight is %.4g at [%lld, %lld]",
                      side, i, shifted, static_cast<double>(weight[at]), static_cast<long long>(at / n),
                      static_cast<long long>(at % n));
        return failed_precondition(request.name + ": weights too large for fp16 scales: " + text +
                                   "; divide the weights by a power of two, or look for damage there");
      }
      const uint16_t magnitude = encode_f16(static_cast<float>(shifted));
      if (magnitude == 0) {
        ++n_zero;
        if (values[i] > 0 && n_lost++ == 0) first_lost = static_cast<int64_t>(i);
      }
      values[i] = decode_f16(magnitude);
      out[i] = static_cast<uint16_t>(magnitude | (magnitude != 0 && signs.sign(i) < 0 ? 0x8000u : 0u));
    }
    return ok_status();
  };
  RETURN_IF_ERROR(round_scales(su, exponent, su_signs, "input", scales.suh, scales.n_zero_rows, scales.n_lost_rows,
                               scales.first_lost_row));
  RETURN_IF_ERROR(round_scales(sv, -exponent, sv_signs, "output", scales.svh, scales.n_zero_columns,
                               scales.n_lost_columns, scales.first_lost_column));
  scales.is_zero = scales.n_zero_rows == k || scales.n_zero_columns == n;

  fill_gaps(su);
  fill_gaps(sv);
  scales.su = std::move(su);
  scales.sv = std::move(sv);
  return scales;
}

}  // namespace espalier::codec
