// Factorisation of a Hessian for error feedback: H = L D L^T with unit lower block-triangular L and 16x16 blocks.
// Internal.
//
// Plain fp64 in which every element is one chain over ascending columns, so blocking, threads and tiers do not change
// bits. Source: docs/formats/exl3.md, "Quantizing"; QuIP# (arXiv 2402.04396), block LDLQ.
#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.h"
#include "base/simd_tier.h"

namespace espalier::codec {

// a [n, n] symmetric positive definite, n a multiple of 16, of which the upper triangle is read; becomes U with a = U^T
// U in its upper triangle (what is below is spoiled). False when a pivot is not positive or not finite; `a` is then
// spoiled.
bool cholesky_upper(double* a, int64_t n, ThreadPool& pool, SimdTier tier = active_simd_tier());

// x [n] := the solution of U^T U x = x.
void solve_cholesky(const double* upper, int64_t n, double* x);

// Row r of the result is column r of L, for rows of L below r's 16-block; zero elsewhere: feedback[r*n + s] = L[s][r].
std::vector<double> block_ldl_feedback(const double* upper, int64_t n, ThreadPool& pool);

}  // namespace espalier::codec
