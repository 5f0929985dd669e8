// Factorisation of a Hessian for error feedback: H = L D L^T with unit lower block-triangular L and 16x16 blocks. Internal.
//
// Plain fp64 loops in which every element is one chain over ascending columns, so blocking and threads do not change bits.
// Source: docs/formats/exl3.md, "Quantizing"; QuIP# (arXiv 2402.04396), block LDLQ.
#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.h"

namespace espalier::codec {

// a [n, n] symmetric positive definite, of which the upper triangle is read; becomes U with a = U^T U in its upper triangle.
// False when a pivot is not positive or not finite; `a` is then spoiled.
bool cholesky_upper(double* a, int64_t n, ThreadPool& pool);

// x [n] := the solution of U^T U x = x.
void solve_cholesky(const double* upper, int64_t n, double* x);

// The blocks of L below the diagonal, for row blocks of 16: feedback[b] is [n, 16] with element (r, i) = L[r][16*b + i] for
// rows r >= 16*(b+1). Flat: index ((b*n + r)*16 + i).
std::vector<double> block_ldl_feedback(const double* upper, int64_t n, ThreadPool& pool);

}  // namespace espalier::codec
