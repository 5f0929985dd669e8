// The loop of strip_product for vectors of kLanes doubles and kRows rows at a time. Included by one file per
// instruction set, each of which keeps it in its own unnamed namespace.
#include "codec/strip_product.h"

namespace espalier::codec {
namespace {

template <int kLanes>
struct VectorOf {
  typedef double Type __attribute__((vector_size(kLanes * sizeof(double))));
  typedef double Unaligned __attribute__((vector_size(kLanes * sizeof(double)), aligned(8), may_alias));
};

template <int kLanes, int kRows>
inline void product_rows(const StripProduct& p, int64_t row) {
  using Vector = typename VectorOf<kLanes>::Type;
  using Unaligned = typename VectorOf<kLanes>::Unaligned;
  constexpr int kVectors = kStripWidth / kLanes;
  const double* a = p.a + row * p.a_stride;
  double* out = p.out + row * p.out_stride;
  Vector sum[kRows * kVectors] = {};
  if (p.add) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows * kVectors; ++i) {
      sum[i] = *reinterpret_cast<const Unaligned*>(out + i / kVectors * p.out_stride + i % kVectors * kLanes);
    }
  }
  for (int64_t j = 0; j < p.cols; ++j) {
    const double* column = p.strip + j * kStripWidth;
#pragma GCC unroll 16
    for (int i = 0; i < kRows * kVectors; ++i) {
      const Vector value = *reinterpret_cast<const Unaligned*>(column + i % kVectors * kLanes);
      sum[i] = sum[i] + value * a[i / kVectors * p.a_stride + j];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows * kVectors; ++i) {
    *reinterpret_cast<Unaligned*>(out + i / kVectors * p.out_stride + i % kVectors * kLanes) = sum[i];
  }
}

template <int kLanes, int kRows>
inline void product_all(const StripProduct& p) {
  int64_t row = 0;
  for (; row + kRows <= p.rows; row += kRows) product_rows<kLanes, kRows>(p, row);
  for (; row < p.rows; ++row) product_rows<kLanes, 1>(p, row);
}

}  // namespace
}  // namespace espalier::codec
