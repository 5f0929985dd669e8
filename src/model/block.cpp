#include "model/block.h"

#include <algorithm>
#include <cstring>

#include "model/moe.h"
#include "model/project.h"
#include "ops/mhc.h"
#include "tensor/float_formats.h"

namespace espalier {
namespace {

struct Coefficients {
  std::vector<float> pre, post, comb;
};

Coefficients mixes(const CallContext& context, const MixWeights& w, const float* h, int64_t n_rows) {
  const Config& c = context.config;
  const int64_t n = c.n_streams;
  const std::vector<float> dots = project(context, w.fn, "", h, n_rows, Rounding::kNone);
  Coefficients out{std::vector<float>(static_cast<size_t>(n_rows * n)),
                   std::vector<float>(static_cast<size_t>(n_rows * n)),
                   std::vector<float>(static_cast<size_t>(n_rows * n * n))};
  ops::MhcCoefficientsParams p;
  p.h = h;
  p.dots = dots.data();
  p.scale = w.scale.data();
  p.base = w.base.data();
  p.pre = out.pre.data();
  p.post = out.post.data();
  p.comb = out.comb.data();
  p.n_rows = n_rows;
  p.n_streams = n;
  p.d_model = c.d_model;
  p.sinkhorn_iters = c.sinkhorn_iters;
  p.norm_eps = c.rms_norm_eps;
  p.hc_eps = static_cast<float>(c.hc_eps);
  ops::mhc_coefficients(context.pool, p);
  return out;
}

void observe(const CallContext& context, int block, const std::string& site, const Coefficients& k, int64_t n_rows) {
  if (context.observer == nullptr) return;
  const int64_t n = context.config.n_streams;
  context.observer->value(block, "hc." + site + "_pre", k.pre.data(), n_rows, n);
  context.observer->value(block, "hc." + site + "_post", k.post.data(), n_rows, n);
  context.observer->value(block, "hc." + site + "_comb", k.comb.data(), n_rows, n * n);
}

void observe(const CallContext& context, int block, std::string_view what, const float* x, int64_t n_rows,
             int64_t cols) {
  if (context.observer != nullptr) context.observer->value(block, what, x, n_rows, cols);
}

}  // namespace

void run_block(const CallContext& context, const BlockWeights& weights, int block, Tensor& h, Tensor& pre,
               const std::function<void(const float* x, float* y)>& attention) {
  const Config& c = context.config;
  const int64_t n_rows = h.dim(0);
  const int64_t d = c.d_model;
  std::vector<float> x(static_cast<size_t>(n_rows * d));
  std::vector<float> y(static_cast<size_t>(n_rows * d));
  Tensor next(DType::kF32, h.shape());
  // Collapses h with the weights of the previous sub-layer, normalises, runs `body`, expands with this sub-layer's own.
  const auto sub_layer = [&](const float* collapse_weights, const std::vector<float>& norm, const Coefficients& k,
                             const char* in_name, const char* out_name, const std::function<void()>& body) {
    ops::mhc_collapse(context.pool, {h.f32(), collapse_weights, x.data(), n_rows, c.n_streams, d});
    round_if_vendor(context, x.data(), n_rows * d);
    normalise(context, x.data(), norm, n_rows, x.data());
    observe(context, block, in_name, x.data(), n_rows, d);
    body();
    observe(context, block, out_name, y.data(), n_rows, d);
    ops::mhc_expand(context.pool,
                    {y.data(), h.f32(), k.post.data(), k.comb.data(), next.f32(), n_rows, c.n_streams, d});
    round_if_vendor(context, next.f32(), n_rows * c.n_streams * d);
    std::swap(h, next);
  };
  const Coefficients a = mixes(context, weights.hc_attn, h.f32(), n_rows);
  observe(context, block, "attn", a, n_rows);
  sub_layer(pre.f32(), weights.attn_norm, a, "attn.in", "attn.out", [&] { attention(x.data(), y.data()); });
  const Coefficients f = mixes(context, weights.hc_ffn, h.f32(), n_rows);
  observe(context, block, "ffn", f, n_rows);
  sub_layer(a.pre.data(), weights.ffn_norm, f, "ffn.in", "ffn.out",
            [&] { run_moe(context, weights.moe, block, x.data(), n_rows, y.data()); });
  std::copy(f.pre.begin(), f.pre.end(), pre.f32());
  observe(context, block, "stream.out", h.f32(), n_rows, c.n_streams * d);
  observe(context, block, "pre", pre.f32(), n_rows, c.n_streams);
}

void bf16_row(const ConstView& table, int64_t row, float* out) {
  const int64_t d = table.shape[1];
  const uint8_t* p = static_cast<const uint8_t*>(table.data) + row * d * 2;
  for (int64_t i = 0; i < d; ++i) {
    uint16_t bits;
    std::memcpy(&bits, p + 2 * i, 2);
    out[i] = decode_bf16(bits);
  }
}

void embed_rows(const Config& config, const GlobalWeights& globals, const int32_t* ids, int64_t n, Tensor& h,
                Tensor& pre) {
  const int64_t d = config.d_model;
  h = Tensor(DType::kF32, {n, config.n_streams, d});
  pre = Tensor(DType::kF32, {n, config.n_streams});
  for (int64_t t = 0; t < n; ++t) {
    float* row = h.f32() + t * config.n_streams * d;
    bf16_row(globals.embed, ids[t], row);
    for (int64_t s = 1; s < config.n_streams; ++s) std::copy_n(row, d, row + s * d);
    pre.f32()[t * config.n_streams] = 1.0f;
  }
}

}  // namespace espalier
