// The loops of kernels.h, written once over F16 (16 float lanes) and compiled by each tier file inside an anonymous
// namespace. No standard-library templates here: an inline function instantiated with newer instructions could be
// linked into code that runs on older machines.
//
// Orders that make all tiers equal: a matrix product is one FMA chain over k ascending; a dot product has 16 lanes
// (element i in lane i mod 16, FMA) and a fixed tree; a sum of squares has 16 double lanes (products are exact in
// double) and the same tree; everything else is one rounding per written operation.

// acc[r][c] over R rows and C columns of 16 lanes.
template <int R, int C>
static inline void matmul_micro(const float* x, int64_t ldx, const float* const* b, int64_t k, F16 (*acc)[C]) {
  F16 a[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) a[r][c] = f16_zero();
  for (int64_t i = 0; i < k; ++i) {
    F16 w[C];
    for (int c = 0; c < C; ++c) w[c] = f16_load(b[c] + i * kPanelWidth);
    for (int r = 0; r < R; ++r) {
      const F16 xv = f16_set(x[r * ldx + i]);
      for (int c = 0; c < C; ++c) a[r][c] = f16_fma(xv, w[c], a[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) acc[r][c] = a[r][c];
}

static inline void store_columns(const F16& v, float* y, int64_t n) {
  if (n >= 16) {
    f16_store(y, v);
    return;
  }
  float t[16];
  f16_store(t, v);
  for (int64_t i = 0; i < n; ++i) y[i] = t[i];
}

// R rows from `row`, C columns of 16 from `col`.
template <int R, int C>
static inline void matmul_columns(const MatmulBlock& m, int64_t row, int64_t col) {
  const float* b[C];
  for (int c = 0; c < C; ++c) b[c] = m.panels + ((col + c) / 2) * m.k * kPanelWidth + ((col + c) % 2) * 16;
  F16 acc[R][C];
  matmul_micro<R, C>(m.x + row * m.ldx, m.ldx, b, m.k, acc);
  for (int c = 0; c < C; ++c) {
    const int64_t o = (col + c) * 16;
    if (o >= m.n) break;
    for (int r = 0; r < R; ++r) store_columns(acc[r][c], m.y + (row + r) * m.ldy + o, m.n - o);
  }
}

// R rows from `row` over all columns of the block's panels, C columns of 16 at a time.
template <int R, int C>
static void matmul_rows(const MatmulBlock& m, int64_t row) {
  const int64_t column_end = m.panel_end * 2;
  int64_t col = m.panel_begin * 2;
  for (; col + C <= column_end; col += C) matmul_columns<R, C>(m, row, col);
  for (; col < column_end; ++col) matmul_columns<R, 1>(m, row, col);
}

static void k_matmul(const MatmulBlock& m) {
  int64_t row = m.row_begin;
  while (row < m.row_end) {
    const int64_t left = m.row_end - row;
    if (left >= kMicroRows) {
      matmul_rows<kMicroRows, kMicroColumns>(m, row);
      row += kMicroRows;
    } else if (left >= 4) {
      matmul_rows<4, kMicroColumns4>(m, row);
      row += 4;
    } else if (left >= 2) {
      matmul_rows<2, kMicroColumns2>(m, row);
      row += 2;
    } else {
      matmul_rows<1, kMicroColumns1>(m, row);
      row += 1;
    }
  }
}

static double k_sum_squares(const float* x, int64_t n) {
  double lane[16] = {0};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int l = 0; l < 16; ++l) {
      const double v = static_cast<double>(x[i + l]);
      lane[l] = lane[l] + v * v;
    }
  for (int l = 0; i < n; ++i, ++l) {
    const double v = static_cast<double>(x[i]);
    lane[l] = lane[l] + v * v;
  }
  for (int w = 8; w >= 1; w /= 2)
    for (int l = 0; l < w; ++l) lane[l] = lane[l] + lane[l + w];
  return lane[0];
}

static double k_gate_dot(const float* h, const float* q, const float* k, const float* key, int64_t n) {
  double lane[16] = {0};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int l = 0; l < 16; ++l) {
      const double a = static_cast<double>(h[i + l]) * static_cast<double>(key[i + l]);
      const double b = static_cast<double>(q[i + l]) * static_cast<double>(k[i + l]);
      lane[l] = lane[l] + a * b;
    }
  for (int l = 0; i < n; ++i, ++l) {
    const double a = static_cast<double>(h[i]) * static_cast<double>(key[i]);
    const double b = static_cast<double>(q[i]) * static_cast<double>(k[i]);
    lane[l] = lane[l] + a * b;
  }
  for (int w = 8; w >= 1; w /= 2)
    for (int l = 0; l < w; ++l) lane[l] = lane[l] + lane[l + w];
  return lane[0];
}

static void k_scale_by(const float* x, const float* w, float r, int64_t n, float* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = w[i] * (x[i] * r);
}

static void k_add_scaled(float* h, const float* v, float g, int64_t n) {
  for (int64_t i = 0; i < n; ++i) h[i] = h[i] + g * v[i];
}

static void k_collapse(const float* h, const float* w, int64_t n_streams, int64_t d_model, float* out) {
  for (int64_t d = 0; d < d_model; ++d) out[d] = w[0] * h[d];
  for (int64_t c = 1; c < n_streams; ++c) {
    const float* hc = h + c * d_model;
    const float wc = w[c];
    for (int64_t d = 0; d < d_model; ++d) out[d] = out[d] + wc * hc[d];
  }
}

static void k_expand(const float* y, const float* h, const float* post, const float* comb, int64_t n_streams,
                     int64_t d_model, float* out) {
  for (int64_t j = 0; j < n_streams; ++j) {
    float* o = out + j * d_model;
    const float pj = post[j];
    for (int64_t d = 0; d < d_model; ++d) o[d] = pj * y[d];
    for (int64_t i = 0; i < n_streams; ++i) {
      const float* hi = h + i * d_model;
      const float c = comb[i * n_streams + j];
      for (int64_t d = 0; d < d_model; ++d) o[d] = o[d] + c * hi[d];
    }
  }
}

// Eight doubles at a time; the steps are exp_d's, so the bits are too.
typedef double D8 __attribute__((vector_size(64)));
typedef uint64_t U8 __attribute__((vector_size(64)));
typedef float S8 __attribute__((vector_size(32), aligned(4), may_alias));

static inline void exp8(D8& x) {
  const D8 low = D8{} - 708.0, high = D8{} + 709.0;
  x = x < low ? low : x;
  x = x > high ? high : x;
  const D8 shifted = x * 1.4426950408889634074 + 0x1.8p52;
  const D8 k = shifted - 0x1.8p52;
  D8 r = x - k * 0x1.62e42feep-1;
  r = r - k * 0x1.a39ef35793c76p-33;
  D8 p = D8{} + kExpCoefficients[0];
  for (int i = 1; i < kExpTerms; ++i) p = p * r + kExpCoefficients[i];
  const U8 bits = (U8)shifted - __builtin_bit_cast(uint64_t, 0x1.8p52);
  x = p * (D8)((bits + 1023u) << 52);
}

static inline float silu_product(float a, float u, float limit, float gate) {
  a = a > limit ? limit : a;
  u = u > limit ? limit : u;
  u = u < -limit ? -limit : u;
  const double ad = static_cast<double>(a);
  const float s = static_cast<float>(ad / (1.0 + exp_d(-ad)));
  return s * u * gate;
}

static void k_swiglu(const float* a, const float* u, float limit, float gate, int64_t n, float* z) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const S8 top = S8{} + limit, bottom = S8{} - limit;
    S8 av = *(const S8*)(a + i), uv = *(const S8*)(u + i);
    av = av > top ? top : av;
    uv = uv > top ? top : uv;
    uv = uv < bottom ? bottom : uv;
    const D8 ad = __builtin_convertvector(av, D8);
    D8 e = -ad;
    exp8(e);
    *(S8*)(z + i) = __builtin_convertvector(ad / (1.0 + e), S8) * uv * gate;
  }
  for (; i < n; ++i) z[i] = silu_product(a[i], u[i], limit, gate);
}

static inline void exp_in_place(float* x, float m, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    D8 e = __builtin_convertvector(*(const S8*)(x + i) - m, D8);
    exp8(e);
    *(S8*)(x + i) = __builtin_convertvector(e, S8);
  }
  for (; i < n; ++i) x[i] = static_cast<float>(exp_d(static_cast<double>(x[i] - m)));
}

// scores[h][j] = dot(q[h], kv[j]) * scale for heads h0 .. h0+H-1.
template <int H>
static inline void score_heads(const AttentionRow& a, int64_t h0) {
  const int64_t whole = a.head_dim / 16 * 16;
  for (int64_t j = 0; j < a.n_keys; ++j) {
    const float* kv = a.kv[j];
    F16 acc[H];
    for (int h = 0; h < H; ++h) acc[h] = f16_zero();
    if (kv != nullptr) {
      for (int64_t d = 0; d < whole; d += 16) {
        const F16 v = f16_load(kv + d);
        for (int h = 0; h < H; ++h) acc[h] = f16_fma(f16_load(a.q + (h0 + h) * a.head_dim + d), v, acc[h]);
      }
      if (whole < a.head_dim) {
        float kt[16] = {0}, qt[16] = {0};
        for (int64_t d = whole; d < a.head_dim; ++d) kt[d - whole] = kv[d];
        for (int h = 0; h < H; ++h) {
          for (int64_t d = whole; d < a.head_dim; ++d) qt[d - whole] = a.q[(h0 + h) * a.head_dim + d];
          acc[h] = f16_fma(f16_load(qt), f16_load(kt), acc[h]);
        }
      }
    }
    for (int h = 0; h < H; ++h) {
      a.scores[(h0 + h) * a.n_keys + j] = kv != nullptr ? f16_sum(acc[h]) * a.scale : -__builtin_inff();
    }
  }
}

// out[h][d] = chain over keys of fma(p[h][j], kv[j][d]), for heads h0 .. h0+H-1 and keys j0 .. j1-1, on top of what is
// there.
template <int H>
static inline void accumulate_heads(const AttentionRow& a, int64_t h0, int64_t j0, int64_t j1) {
  const int64_t whole = a.head_dim / 16 * 16;
  for (int64_t d = 0; d < whole; d += 16) {
    F16 acc[H];
    for (int h = 0; h < H; ++h) acc[h] = f16_load(a.out + (h0 + h) * a.head_dim + d);
    for (int64_t j = j0; j < j1; ++j) {
      if (a.kv[j] == nullptr) continue;
      const F16 v = f16_load(a.kv[j] + d);
      for (int h = 0; h < H; ++h) acc[h] = f16_fma(f16_set(a.scores[(h0 + h) * a.n_keys + j]), v, acc[h]);
    }
    for (int h = 0; h < H; ++h) f16_store(a.out + (h0 + h) * a.head_dim + d, acc[h]);
  }
  if (whole < a.head_dim) {
    for (int h = 0; h < H; ++h) {
      float* o = a.out + (h0 + h) * a.head_dim;
      float t[16] = {0}, kt[16] = {0};
      for (int64_t d = whole; d < a.head_dim; ++d) t[d - whole] = o[d];
      F16 acc = f16_load(t);
      for (int64_t j = j0; j < j1; ++j) {
        if (a.kv[j] == nullptr) continue;
        for (int64_t d = whole; d < a.head_dim; ++d) kt[d - whole] = a.kv[j][d];
        acc = f16_fma(f16_set(a.scores[(h0 + h) * a.n_keys + j]), f16_load(kt), acc);
      }
      f16_store(t, acc);
      for (int64_t d = whole; d < a.head_dim; ++d) o[d] = t[d - whole];
    }
  }
}

static void score_all(const AttentionRow& a) {
  int64_t h = 0;
  for (; h + 4 <= a.n_heads; h += 4) score_heads<4>(a, h);
  for (; h < a.n_heads; ++h) score_heads<1>(a, h);
}

static void accumulate_all(const AttentionRow& a, int64_t j0, int64_t j1) {
  int64_t h = 0;
  for (; h + 4 <= a.n_heads; h += 4) accumulate_heads<4>(a, h, j0, j1);
  for (; h < a.n_heads; ++h) accumulate_heads<1>(a, h, j0, j1);
}

static void k_attention(const AttentionRow& a) {
  score_all(a);
  float* den = a.scores + a.n_heads * a.n_keys;
  for (int64_t h = 0; h < a.n_heads; ++h) {
    float* s = a.scores + h * a.n_keys;
    float m = -1e30f;
    for (int64_t j = 0; j < a.n_keys; ++j) m = s[j] > m ? s[j] : m;
    exp_in_place(s, m, a.n_keys);
    double sum = 0;
    for (int64_t j = 0; j < a.n_keys; ++j) sum = sum + static_cast<double>(s[j]);
    den[h] = static_cast<float>(sum + exp_d(static_cast<double>(a.sink[h] - m)));
  }
  for (int64_t i = 0; i < a.n_heads * a.head_dim; ++i) a.out[i] = 0.0f;
  accumulate_all(a, 0, a.n_keys);
  for (int64_t h = 0; h < a.n_heads; ++h) {
    float* o = a.out + h * a.head_dim;
    for (int64_t d = 0; d < a.head_dim; ++d) o[d] = o[d] / den[h];
  }
}

static inline float bf16_round(float x) {
  const uint32_t u = __builtin_bit_cast(uint32_t, x);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return x;
  return __builtin_bit_cast(float, (u + 0x7FFFu + ((u >> 16) & 1u)) & 0xFFFF0000u);
}

// Online softmax over blocks of 64 places: probabilities relative to the running maximum are rounded to bf16 for the
// product, the denominator sums them unrounded.
static void k_attention_online(const AttentionRow& a) {
  score_all(a);
  for (int64_t i = 0; i < a.n_heads * a.head_dim; ++i) a.out[i] = 0.0f;
  for (int64_t h = 0; h < a.n_heads; ++h) {
    AttentionRow one = a;
    one.n_heads = 1;
    one.scores = a.scores + h * a.n_keys;
    one.out = a.out + h * a.head_dim;
    float m = -1e30f;
    float den = 0.0f;
    for (int64_t j0 = 0; j0 < a.n_keys; j0 += 64) {
      const int64_t j1 = j0 + 64 < a.n_keys ? j0 + 64 : a.n_keys;
      const float before = m;
      for (int64_t j = j0; j < j1; ++j) m = one.scores[j] > m ? one.scores[j] : m;
      const float shrink = static_cast<float>(exp_d(static_cast<double>(before - m)));
      exp_in_place(one.scores + j0, m, j1 - j0);
      double sum = 0;
      for (int64_t j = j0; j < j1; ++j) sum = sum + static_cast<double>(one.scores[j]);
      den = den * shrink + static_cast<float>(sum);
      for (int64_t j = j0; j < j1; ++j) one.scores[j] = bf16_round(one.scores[j]);
      for (int64_t d = 0; d < a.head_dim; ++d) one.out[d] = one.out[d] * shrink;
      accumulate_heads<1>(one, 0, j0, j1);
    }
    den = den + static_cast<float>(exp_d(static_cast<double>(a.sink[h] - m)));
    for (int64_t d = 0; d < a.head_dim; ++d) one.out[d] = one.out[d] / den;
  }
}

static void k_index_scores(const IndexScoreRow& s) {
  for (int64_t j0 = 0; j0 < s.n_keys; j0 += 1024) {
    const int64_t n = s.n_keys - j0 < 1024 ? s.n_keys - j0 : 1024;
    MatmulBlock m = {s.queries, s.dim,        s.key_panels + j0 * s.dim, s.dim, n, s.scratch, 1024, 0, s.n_heads,
                     0,         (n + 31) / 32};
    k_matmul(m);
    float* out = s.out + j0;
    for (int64_t j = 0; j < n; ++j) out[j] = 0.0f;
    for (int64_t h = 0; h < s.n_heads; ++h) {
      const float* t = s.scratch + h * 1024;
      const float w = s.weights[h];
      if (s.round_bf16) {
        for (int64_t j = 0; j < n; ++j) {
          const float v = bf16_round(t[j]);
          out[j] = out[j] + bf16_round((v > 0.0f ? v : 0.0f) * w);
        }
      } else {
        for (int64_t j = 0; j < n; ++j) out[j] = out[j] + (t[j] > 0.0f ? t[j] : 0.0f) * w;
      }
    }
    if (s.round_bf16)
      for (int64_t j = 0; j < n; ++j) out[j] = bf16_round(out[j]);
  }
}

static inline float largest_magnitude(const float* x, int64_t n) {
  float a = 0.0f;
  for (int64_t i = 0; i < n; ++i) {
    const float v = __builtin_fabsf(x[i]);
    a = v > a ? v : a;
  }
  return a;
}

// 2^ceil(log2(x)) from the float's bits, for x > 0.
static inline float power_of_two_at_least(float x) {
  const uint32_t u = __builtin_bit_cast(uint32_t, x);
  return __builtin_bit_cast(float, (((u >> 23) & 0xFFu) + ((u & 0x7FFFFFu) != 0 ? 1u : 0u)) << 23);
}

// Nearest e4m3 value of |x| <= 448, ties to even: the step is 2^(exponent - 3), at least 2^-9, and adding 1.5 * 2^23
// steps rounds to a multiple of it.
static inline float nearest_e4m3(float x) {
  const uint32_t u = __builtin_bit_cast(uint32_t, x) & 0x7F800000u;
  const uint32_t step_bits = (u > (121u << 23) ? u : (121u << 23)) - (3u << 23);
  const float big = __builtin_bit_cast(float, step_bits) * 12582912.0f;
  return x < 0.0f ? (x - big) + big : (x + big) - big;
}

// Nearest e2m1 value of |x| <= 6, ties to the even code: steps of 0.5 below 2, 1 below 4, 2 above.
static inline float nearest_e2m1(float x) {
  const float a = __builtin_fabsf(x);
  const float step = a < 2.0f ? 0.5f : a < 4.0f ? 1.0f : 2.0f;
  const float big = step * 12582912.0f;
  const float r = (a + big) - big;
  return x < 0.0f ? 0.0f - r : r;
}

static inline float clamp_to(float x, float limit) {
  x = x > limit ? limit : x;
  return x < -limit ? -limit : x;
}

static void k_quantise_act(float* x, int64_t n) {
  const float a = largest_magnitude(x, n);
  const float s = power_of_two_at_least((a > 1e-4f ? a : 1e-4f) * (1.0f / 448.0f));
  for (int64_t i = 0; i < n; ++i) x[i] = nearest_e4m3(clamp_to(x[i] / s, 448.0f)) * s;
}

static inline void quantise_e2m1(float* x, int64_t n, float s) {
  for (int64_t i = 0; i < n; ++i) x[i] = nearest_e2m1(clamp_to(x[i] / s, 6.0f)) * s;
}

static void k_quantise_fp4(float* x, int64_t n) {
  const float a = largest_magnitude(x, n);
  const float low = 6.0f * 0x1.0p-126f;
  quantise_e2m1(x, n, power_of_two_at_least((a > low ? a : low) * (1.0f / 6.0f)));
}

static void k_quantise_kv4(float* x, int64_t n) {
  const float a = largest_magnitude(x, n);
  const float low = 6.0f * 0x1.0p-9f;
  quantise_e2m1(x, n, nearest_e4m3(clamp_to((a > low ? a : low) / 6.0f, 448.0f)));
}

static const Kernels kTable = {k_matmul,       k_sum_squares,  k_scale_by,     k_attention, k_attention_online,
                               k_index_scores, k_swiglu,       k_collapse,     k_expand,    k_gate_dot,
                               k_quantise_act, k_quantise_fp4, k_quantise_kv4, k_add_scaled};
