// Matrix product with packed weights: y[t][o] = sum_k x[t][k] * w[k][o].
//
// Every output is one chain of correctly rounded fused multiply-adds over ascending k, starting at 0; vectors run over
// o and t, never over k. The result of a row is therefore independent of the other rows, of blocking, threads and SIMD
// tier. The reference (double accumulators) agrees within k * eps * |x|.|w|. Used for everything that can reach a
// pack's bytes.
#pragma once

#include <cstdint>
#include <functional>

#include "base/thread_pool.h"
#include "tensor/view.h"

namespace espalier::ops {

// W [k, n] packed into panels of 32 columns: panel p holds w[i][32p .. 32p+31] for i = 0..k-1, zero beyond n.
struct PackedMatrix {
  int64_t k = 0;
  int64_t n = 0;
  Tensor panels;  // [ceil(n/32), k, 32]:f32

  bool empty() const { return panels.empty(); }
};

// w [k, n] row-major.
PackedMatrix pack_kn(const float* w, int64_t k, int64_t n);
// Rows of the transposed matrix: row(o, out) writes w[0..k-1][o] to out[0..k-1].
PackedMatrix pack_rows(int64_t k, int64_t n, const std::function<void(int64_t o, float* out)>& row);
// w [k, n] := the packed matrix.
void unpack_kn(const PackedMatrix& packed, float* w);

struct MatmulParams {
  const float* x = nullptr;  // [n_rows, k]
  int64_t n_rows = 0;
  const PackedMatrix* weight = nullptr;  // [k, n]
  float* y = nullptr;                    // [n_rows, n]; must not alias x
};

// Threads: the pool's; the result does not depend on their number.
void matmul(ThreadPool& pool, const MatmulParams& p);

namespace reference {
void matmul(const MatmulParams& p);
}

}  // namespace espalier::ops
