// What exllamav3 makes of a layer's Hessian before it quantizes: damped, signed, rotated, factorised. Restated for
// comparison.
//
// Only the signs of the input scales enter the rotation; their magnitudes never do, which is v1.4.1's behaviour and the
// largest difference to codec/quantizer.h. fp64 in plain loops; upstream works in fp32 on a GPU. Source: EXL3
// specification 5.2.
#pragma once

#include <cstdint>
#include <vector>

namespace espalier::peer {

struct PreparedHessian {
  bool is_fallback = true;       // no Hessian, or nothing in it: tiles are encoded without feedback
  std::vector<double> diagonal;  // [k] damped, original basis
  std::vector<double> damped;    // [k, k] original basis
  std::vector<double> rotated;   // [k, k] Hk diag(s) (H + damping) diag(s) Hk
  std::vector<double> feedback;  // [k, k] L of H = L D L^T with 16x16 blocks, diagonal blocks zero
  double damping = 0;            // of the mean diagonal; grows when the factorisation fails
};

// hessian [k, k] or null, any scale that exllamav3 would accept (mean diagonal at least 1e-20); signs [k]: +-1 as
// drawn. CHECKs that one of eleven attempts is positive definite, as upstream raises otherwise.
PreparedHessian prepare_hessian(const double* hessian, int64_t k, const std::vector<float>& signs, double damping);

// x := a^-1 x for a symmetric positive definite [n, n]; false when it is not. Spoils a.
bool solve_spd(std::vector<double>& a, int64_t n, std::vector<double>& x);

}  // namespace espalier::peer
