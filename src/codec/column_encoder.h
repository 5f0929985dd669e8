// The search for the states of a group of columns: LDLQ with feedback along inputs and outputs, then coordinate descent
// on the same objective tr(E^T H E G). Internal to the quantizer.
//
// With H = L D L^T and G = M C M^T (unit block-triangular, 16x16 blocks) the objective is the sum over tiles of
// tr(F_bs^T D_b F_bs C_s) for F = L^T E M. Tiles are visited from the last row block and the last strip; each target is
// the weight corrected so that its F is its own error: by P = L^T E of the tiles below, then by (E + P) M of the tiles
// to the right. A tile needs what lies below it and right of it only, so the tiles of one antidiagonal are independent.
//
// G is the rotated output metric Hn diag(svh) G0 diag(svh) Hn. When G0 is diagonal (the identity included) it couples
// columns inside 128-blocks only, so groups of 128 columns are independent problems.
//
// LDLQ is greedy. A sweep of coordinate descent visits every tile again with all others fixed. With R = (H E G)_bs the
// best real-valued content is T = Q + H_bb^-1 R G_ss^-1, and a content Q costs tr((T-Q)^T H_bb (T-Q) G_ss) more than
// it. Two candidates are searched: T, and the point Q + R / (0.6 lambda_max(H_bb) lambda_max(G_ss)), towards which the
// search must move so that its plain squared error stands in for the metric. Each is taken only when the cost falls, so
// the objective never rises. Source: docs/formats/exl3.md, "Quantizing"; QuIP# (arXiv 2402.04396); YAQA (arXiv
// 2505.22988).
#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.h"
#include "codec/exl3_tensor.h"
#include "codec/viterbi.h"

namespace espalier::codec {

// One side of the objective in the rotated basis.
struct SideMetric {
  int64_t size = 0;
  std::vector<double> metric;    // [size, size], damped
  std::vector<double> feedback;  // [size, size], see block_ldl_feedback
  std::vector<double> inverse;   // [size/16, 16, 16]: inverses of the diagonal blocks; descent only
  std::vector<double> largest;   // [size/16]: their largest eigenvalues; descent only
};
// Fills `inverse` and `largest` from `metric`.
void prepare_descent(SideMetric* side);

struct ColumnProblem {
  const double* weight = nullptr;  // [k, n], rotated, of the whole matrix
  int64_t k = 0;
  int64_t n = 0;
  int64_t first = 0;  // the group's columns: [first, first + width), multiples of 16
  int64_t width = 0;
  const SideMetric* input = nullptr;   // of size k
  const SideMetric* output = nullptr;  // of size width; null: the identity, no feedback along outputs
  int descent_sweeps = 0;
  SearchOptions search;
};

// Writes the group's tiles into tensor.trellis. Threads: antidiagonals of LDLQ over the pool; groups may also be
// encoded at the same time. The bytes depend on neither.
void encode_columns(const ColumnProblem& problem, Exl3Tensor& tensor, ThreadPool& pool);

}  // namespace espalier::codec
