#include "bench/peer/exllamav3_quantizer.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"
#include "base/rng.h"
#include "bench/peer/exllamav3_refit.h"
#include "codec/hadamard.h"
#include "tensor/float_formats.h"

namespace espalier::peer {
namespace {

using codec::kTile;
using codec::kTileSize;

constexpr float kCodebookScale = 1.24371088f;  // rms of 3inst, used for every codebook

size_t at(int64_t i) {
  return static_cast<size_t>(i);
}

float root_mean_square(double sum, int64_t n) {
  return static_cast<float>(std::sqrt(sum / static_cast<double>(n)));
}

// Hadamard in fp64, result rounded to fp32.
void rotate(std::vector<float>& w, int64_t k, int64_t n, bool along_rows) {
  std::vector<double> d(w.begin(), w.end());
  if (along_rows) {
    codec::hadamard_along_rows(d.data(), k, n);
  } else {
    codec::hadamard_along_columns(d.data(), k, n);
  }
  std::transform(d.begin(), d.end(), w.begin(), [](double x) { return static_cast<float>(x); });
}

bool wants_out_scales(OutScales mode, const PreparedHessian& hessian) {
  if (mode != OutScales::kAuto) return mode == OutScales::kAlways;
  if (hessian.is_fallback) return false;
  std::vector<double> d;
  for (double h : hessian.diagonal) d.push_back(std::sqrt(h));
  std::sort(d.begin(), d.end(), std::greater<>());
  const double top = std::accumulate(d.begin(), d.begin() + static_cast<long>(d.size() / 50), 0.0);
  return top / std::accumulate(d.begin(), d.end(), 0.0) < 0.15;
}

// Steps 1 to 7 of `regularize`: fills weight_r (before the global scale), su, sv.
void regularize(const float* weight, int64_t k, int64_t n, const Signs& signs, OutScales mode, QuantizedMatrix& out) {
  out.weight_r.assign(weight, weight + k * n);
  out.su = signs.su;
  out.sv = signs.sv;
  out.has_out_scales = wants_out_scales(mode, out.hessian);
  std::vector<float>& w = out.weight_r;
  std::vector<double> sums(at(n));
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < n; ++j) sums[at(j)] += double{w[at(i * n + j)]} * double{w[at(i * n + j)]};
  }
  std::vector<float> oc;
  double mean = 0;
  for (double s : sums) {
    oc.push_back(root_mean_square(s, k));
    mean += double{oc.back()} / static_cast<double>(n);
  }
  if (mean > 1e-30) {
    for (float& c : oc) c /= static_cast<float>(mean);
  } else if (mode != OutScales::kAuto) {
    out.has_out_scales = true;
  }
  std::vector<bool> is_zero(at(n));
  for (int64_t j = 0; j < n; ++j) {
    is_zero[at(j)] = std::fabs(oc[at(j)]) < 1e-30f;
    if (is_zero[at(j)]) oc[at(j)] = 0.1f;
    if (out.has_out_scales) out.sv[at(j)] = out.sv[at(j)] * oc[at(j)] + 1e-10f;
  }
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < n; ++j) w[at(i * n + j)] /= out.sv[at(j)];
  }
  for (int64_t j = 0; j < n; ++j) {
    if (is_zero[at(j)]) out.sv[at(j)] = 0;
  }
  rotate(w, k, n, true);
  for (int64_t i = 0; i < k; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < n; ++j) sum += double{w[at(i * n + j)]} * double{w[at(i * n + j)]};
    float ic = root_mean_square(sum, n);
    if (ic < 1e-30f) ic = 0.1f;
    out.su[at(i)] = out.su[at(i)] * ic / -kCodebookScale + 1e-10f;
    for (int64_t j = 0; j < n; ++j) w[at(i * n + j)] /= out.su[at(i)];
  }
  rotate(w, k, n, false);
}

// Tile (kt, nt) of a row-major matrix in ring order.
std::vector<float> ring_tile(const std::vector<float>& w, int64_t n, int64_t kt, int64_t nt) {
  const uint8_t* to_row_major = codec::ring_to_row_major();
  std::vector<float> tile(kTileSize);
  for (int p = 0; p < kTileSize; ++p) {
    const int e = to_row_major[p];
    tile[at(p)] = w[at((kt * kTile + e / kTile) * n + nt * kTile + e % kTile)];
  }
  return tile;
}

// A wrapped diagonal of width 3, then the tiles of highest rms in descending and of lowest in ascending order.
std::vector<std::vector<float>> sample_tiles(const std::vector<float>& w, int64_t k, int64_t n) {
  const int64_t rows = k / kTile, cols = n / kTile, length = std::max(rows, cols);
  std::vector<std::vector<float>> out;
  for (int64_t i = 0; i < length; ++i) {
    for (int64_t d = 0; d < 3; ++d) out.push_back(ring_tile(w, n, i % rows, (i + d) % cols));
  }
  std::vector<double> rms;
  for (int64_t t = 0; t < rows * cols; ++t) {
    double sum = 0;
    for (float x : ring_tile(w, n, t / cols, t % cols)) sum += double{x} * double{x};
    rms.push_back(sum);
  }
  std::vector<int64_t> order(at(rows * cols));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return rms[at(a)] > rms[at(b)]; });
  const int64_t extremes = std::min(std::max<int64_t>(8, 3 * length / 16), (rows * cols + 1) / 2);
  for (int64_t i = 0; i < extremes; ++i) out.push_back(ring_tile(w, n, order[at(i)] / cols, order[at(i)] % cols));
  for (int64_t i = 0; i < extremes; ++i) {
    const int64_t t = order[order.size() - 1 - at(i)];
    out.push_back(ring_tile(w, n, t / cols, t % cols));
  }
  return out;
}

float drift_factor(int k2) {
  switch (k2) {
    case 2:
      return 1.08f;
    case 3:
      return 1.035f;
    case 4:
      return 1.018f;
    case 5:
      return 1.009f;
    case 6:
      return 1.004f;
  }
  return 1.0f;
}

}  // namespace

Signs signs_from_seed(uint64_t seed, const std::string& name, int64_t k, int64_t n) {
  const CounterRng su(seed, name + ".suh"), sv(seed, name + ".svh");
  Signs out;
  for (int64_t i = 0; i < k; ++i) out.su.push_back(-su.sign(static_cast<uint64_t>(i)));
  for (int64_t j = 0; j < n; ++j) out.sv.push_back(sv.sign(static_cast<uint64_t>(j)));
  return out;
}

Signs signs_of(const codec::Exl3Tensor& tensor) {
  Signs out;
  for (uint16_t h : tensor.suh) out.su.push_back(decode_f16(h) > 0 ? -1.0f : 1.0f);
  for (uint16_t h : tensor.svh) out.sv.push_back(decode_f16(h) < 0 ? -1.0f : 1.0f);
  return out;
}

Quantizer::Quantizer(const QuantizerRules& rules)
    : rules_(rules), search_({rules.codebook, rules.k2, !rules.fixed_argmin && rules.k2 % 2 == 0, rules.tier}) {}

// Mean of (Q(s tile) / s - tile)^2 over every `stride`-th tile; infinity as soon as the sum exceeds what `give_up`
// allows, which only happens to a scale that has lost already.
double Quantizer::scale_error(const std::vector<std::vector<float>>& tiles, size_t stride, double scale,
                              double give_up) {
  const float* values = codec::codebook_table_f32(rules_.codebook);
  const double count = static_cast<double>((tiles.size() + stride - 1) / stride * kTileSize);
  const float s = static_cast<float>(scale);
  double sum = 0;
  for (size_t t = 0; t < tiles.size(); t += stride) {
    float scaled[kTileSize];
    uint16_t states[kTileSize];
    for (int p = 0; p < kTileSize; ++p) scaled[p] = s * tiles[t][at(p)];
    search_.run(scaled, states);
    for (int p = 0; p < kTileSize; ++p) {
      const double e = double{values[states[p]] / s - tiles[t][at(p)]};
      sum += e * e;
    }
    if (sum / count > give_up) return INFINITY;
  }
  return sum / count;
}

double Quantizer::search_scale(const std::vector<float>& weight, int64_t k, int64_t n) {
  std::vector<std::vector<float>> tiles = sample_tiles(weight, k, n);
  if (rules_.drift) {
    for (std::vector<float>& tile : tiles) {
      for (float& x : tile) x *= drift_factor(rules_.k2);
    }
  }
  double centre = 0, least = INFINITY;
  for (const int step : {4, 3, 5, 2, 6, 1, 7, 8, 9, 0}) {  // 0.1 + 0.2 step, likely ones first
    const double scale = 0.1 + 0.2 * step;
    const double error = scale_error(tiles, 3, scale, least);
    if (error < least || (error == least && scale < centre)) {
      least = error;
      centre = scale;
    }
  }
  double errors[5];
  int best = -1;
  for (int i = 0; i < 5; ++i) {
    const double scale = centre + 0.075 * (i - 2);
    errors[i] = scale > 0 ? scale_error(tiles, 1, scale, INFINITY) : INFINITY;
    if (best < 0 || errors[i] < errors[best]) best = i;
  }
  double offset = 0;
  if (best > 0 && best < 4) {
    const double denominator = errors[best - 1] - 2 * errors[best] + errors[best + 1];
    if (denominator > 0) offset = std::clamp(0.5 * (errors[best - 1] - errors[best + 1]) / denominator, -0.5, 0.5);
  }
  return std::max(centre + 0.075 * (best - 2) + offset * 0.075, 0.01);
}

// Row blocks from the last to the first, each tile's target corrected by the errors of the blocks below. Packs the
// states and returns the codebook values, [k, n].
std::vector<float> Quantizer::encode(QuantizedMatrix& out) {
  codec::Exl3Tensor& tensor = out.tensor;
  const int64_t k = tensor.k, n = tensor.n;
  const uint8_t* to_row_major = codec::ring_to_row_major();
  const float* values = codec::codebook_table_f32(tensor.codebook);
  std::vector<float> decoded(at(k * n));
  std::vector<double> error(at(k * n)), target(at(kTile * n));
  for (int64_t first = k - kTile; first >= 0; first -= kTile) {
    for (int64_t i = 0; i < kTile * n; ++i) target[at(i)] = out.weight_r[at(first * n + i)];
    for (int64_t r = first + kTile; r < k && !out.hessian.is_fallback; ++r) {
      for (int64_t i = 0; i < kTile; ++i) {
        const double factor = out.hessian.feedback[at(r * k + first + i)];
        for (int64_t j = 0; j < n; ++j) target[at(i * n + j)] += factor * error[at(r * n + j)];
      }
    }
    for (int64_t nt = 0; nt < n / kTile; ++nt) {
      float tile[kTileSize];
      uint16_t states[kTileSize];
      for (int p = 0; p < kTileSize; ++p) {
        const int e = to_row_major[p];
        tile[p] = static_cast<float>(target[at((e / kTile) * n + nt * kTile + e % kTile)]);
      }
      search_.run(tile, states);
      codec::pack_tile(states, tensor.k2,
                       tensor.trellis.data() + (first / kTile * (n / kTile) + nt) * codec::tile_words(tensor.k2));
      for (int p = 0; p < kTileSize; ++p) {
        const int e = to_row_major[p];
        const size_t place = at((first + e / kTile) * n + nt * kTile + e % kTile);
        decoded[place] = values[states[p]];
        error[place] = double{out.weight_r[place]} - double{decoded[place]};
      }
    }
  }
  out.proxy_error = proxy_error(out.weight_r, error, k, n, out.hessian);
  return decoded;
}

QuantizedMatrix Quantizer::quantize(const float* weight, int64_t k, int64_t n, const double* hessian,
                                    const Signs& signs) {
  CHECK(k % codec::kBlock == 0 && n % codec::kBlock == 0) << "[" << k << ", " << n << "]";
  QuantizedMatrix out;
  out.hessian = prepare_hessian(hessian, k, signs.su, rules_.damping);
  regularize(weight, k, n, signs, rules_.out_scales, out);
  out.g_scale = search_scale(out.weight_r, k, n);
  const float g = static_cast<float>(out.g_scale);
  for (float& w : out.weight_r) w *= g;
  for (float& s : out.su) s /= g;
  codec::Exl3Tensor& tensor = out.tensor;
  tensor.k = k;
  tensor.n = n;
  tensor.k2 = rules_.k2;
  tensor.codebook = rules_.codebook;
  tensor.trellis.assign(at(codec::trellis_words(k, n, rules_.k2)), 0);
  const std::vector<float> decoded = encode(out);
  std::vector<float> su = out.su, sv = out.sv;
  if (rules_.refit && !out.hessian.is_fallback) refit_scales(weight, decoded, k, n, out.hessian.damped, su, sv);
  for (float s : su) tensor.suh.push_back(encode_f16(s));
  for (float s : sv) tensor.svh.push_back(encode_f16(s));
  return out;
}

}  // namespace espalier::peer
