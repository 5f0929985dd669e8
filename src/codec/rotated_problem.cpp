#include "codec/rotated_problem.h"

#include "codec/hadamard.h"
#include "codec/trellis.h"
#include "tensor/float_formats.h"

namespace espalier::codec {
namespace {

// Both rotations of a [rows, cols], whole 128-row blocks at a time.
void rotate(double* a, int64_t rows, int64_t cols, ThreadPool& pool) {
  pool.parallel_for(rows / kBlock, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      hadamard_along_rows(a + block * kBlock * cols, kBlock, cols);
      hadamard_along_columns(a + block * kBlock * cols, kBlock, cols);
    }
  });
}

}  // namespace

std::vector<double> rotate_metric(const std::vector<double>& h, double damping, const std::vector<double>& magnitudes,
                                  const std::vector<uint16_t>& signed_scales, ThreadPool& pool) {
  std::vector<double> s(magnitudes);
  for (size_t i = 0; i < s.size(); ++i) {
    if ((signed_scales[i] & 0x8000u) != 0) s[i] = -s[i];
  }
  const size_t size = s.size();
  std::vector<double> r(h.size());
  for (size_t i = 0; i < size; ++i) {
    for (size_t j = 0; j < size; ++j) r[i * size + j] = (h[i * size + j] + (i == j ? damping : 0.0)) * s[i] * s[j];
  }
  rotate(r.data(), static_cast<int64_t>(size), static_cast<int64_t>(size), pool);
  return r;
}

std::vector<double> rotate_weight(const float* weight, int64_t k, int64_t n, const WeightScales& scales,
                                  ThreadPool& pool) {
  std::vector<double> w(static_cast<size_t>(k * n));
  for (int64_t i = 0; i < k; ++i) {
    const double su = decode_f16(scales.suh[static_cast<size_t>(i)]);
    for (int64_t j = 0; j < n; ++j) {
      const double sv = decode_f16(scales.svh[static_cast<size_t>(j)]);
      w[static_cast<size_t>(i * n + j)] = su != 0 && sv != 0 ? double{weight[i * n + j]} / su / sv : 0.0;
    }
  }
  rotate(w.data(), k, n, pool);
  return w;
}

}  // namespace espalier::codec
