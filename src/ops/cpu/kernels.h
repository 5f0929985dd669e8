// The inner loops that are compiled once per CPU tier (baseline, AVX2, AVX-512) from kernels_inl.h. Plain pointers and
// sizes; checking, threading and scratch live in the callers (src/ops/*.cpp). All tiers give the same bits.
#pragma once

#include <cstdint>

namespace espalier::ops {

inline constexpr int64_t kPanelWidth = 32;  // columns of a packed panel: W[k][32], k ascending

struct MatmulBlock {
  const float* x;  // [n_rows, k], row stride ldx
  int64_t ldx;
  const float* panels;  // [ceil(n/32)][k][32]
  int64_t k;
  int64_t n;  // columns of y that exist; the last panel may be wider
  float* y;   // [n_rows, n], row stride ldy
  int64_t ldy;
  int64_t row_begin, row_end;
  int64_t panel_begin, panel_end;
};

struct AttentionRow {
  const float* q;          // [n_heads, head_dim]
  const float* const* kv;  // [n_keys] rows of head_dim; nullptr marks an empty place (online form only)
  int64_t n_keys;
  int64_t n_heads;
  int64_t head_dim;
  const float* sink;  // [n_heads]
  float scale;
  float* scores;  // scratch [n_heads * (n_keys + 1)]
  float* out;     // [n_heads, head_dim]
};

struct IndexScoreRow {
  const float* queries;     // [n_heads, dim]
  const float* weights;     // [n_heads]
  const float* key_panels;  // [ceil(n_keys/32)][dim][32]
  int64_t n_heads, dim, n_keys;
  bool round_bf16;
  float* scratch;  // [n_heads, 1024]
  float* out;      // [n_keys]
};

struct Kernels {
  void (*matmul)(const MatmulBlock& b);
  double (*sum_squares)(const float* x, int64_t n);
  // y = w * (x * r)
  void (*scale_by)(const float* x, const float* w, float r, int64_t n, float* y);
  void (*attention)(const AttentionRow& a);
  void (*attention_online)(const AttentionRow& a);
  void (*index_scores)(const IndexScoreRow& s);
  // z[i] = silu(min(a[i], limit)) * clamp(u[i], +-limit) * gate
  void (*swiglu)(const float* a, const float* u, float limit, float gate, int64_t n, float* z);
  // out[d] = sum_c w[c] * h[c*d_model + d]
  void (*collapse)(const float* h, const float* w, int64_t n_streams, int64_t d_model, float* out);
  // out[j*d_model + d] = post[j]*y[d] + sum_i comb[i*n_streams + j] * h[i*d_model + d]; out may not alias h
  void (*expand)(const float* y, const float* h, const float* post, const float* comb, int64_t n_streams,
                 int64_t d_model, float* out);
  // sum_d h*q*k*key in double
  double (*gate_dot)(const float* h, const float* q, const float* k, const float* key, int64_t n);
  // One group in place: e4m3 codes with a power-of-two scale; e2m1 codes with a power-of-two or an e4m3 scale
  // (fake_quant.h).
  void (*quantise_act)(float* x, int64_t n);
  void (*quantise_fp4)(float* x, int64_t n);
  void (*quantise_kv4)(float* x, int64_t n);
  // h += g * v
  void (*add_scaled)(float* h, const float* v, float g, int64_t n);
};

const Kernels* baseline_kernels();
const Kernels* avx2_kernels();    // x86 only
const Kernels* avx512_kernels();  // x86 only
// Of the active tier; the reference tier uses the baseline here (its callers never get this far).
const Kernels& kernels();

}  // namespace espalier::ops
