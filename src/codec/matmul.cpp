#include "codec/matmul.h"

#include <cstring>
#include <vector>

#include "base/check.h"
#include "codec/hadamard.h"
#include "codec/matmul_panels.h"
#include "tensor/float_formats.h"

namespace espalier::codec {
namespace {

const PanelKernels& kernels_of(SimdTier tier) {
  switch (tier) {
#if defined(__x86_64__)
    case SimdTier::kAvx512: return panel_kernels_avx512();
    case SimdTier::kAvx2: return panel_kernels_avx2();
#endif
    default: return panel_kernels_portable();
  }
}

std::vector<float> decode_scales(const uint16_t* bits, int64_t size) {
  std::vector<float> out(static_cast<size_t>(size));
  for (int64_t i = 0; i < size; ++i) out[static_cast<size_t>(i)] = decode_f16(bits[i]);
  return out;
}

void rotate_input_row(const float* suh, const float* x, int64_t k, float* xh) {
  for (int64_t i = 0; i < k; ++i) xh[i] = x[i] * suh[i];
  hadamard_along_rows(xh, 1, k);
}

// One 128-block of one row: z is overwritten by its rotation.
void rotate_output_block(const float* svh, float* z, float* y) {
  hadamard128_sum(z);
  for (int c = 0; c < kBlock; ++c) y[c] = z[c] * kHadamardScale * svh[c];
}

}  // namespace

void rotate_input(const Exl3View& weight, const float* x, int64_t rows, float* xh) {
  const std::vector<float> suh = decode_scales(weight.suh, weight.k());
  for (int64_t t = 0; t < rows; ++t) rotate_input_row(suh.data(), x + t * weight.k(), weight.k(), xh + t * weight.k());
}

void rotate_output(const Exl3View& weight, const float* z, int64_t rows, float* y) {
  const std::vector<float> svh = decode_scales(weight.svh, weight.n());
  float block[kBlock];
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t c = 0; c < weight.n(); c += kBlock) {
      std::memcpy(block, z + t * weight.n() + c, sizeof block);
      rotate_output_block(svh.data() + c, block, y + t * weight.n() + c);
    }
  }
}

void exl3_matmul(ThreadPool& pool, const Exl3View& weight, const float* x, int64_t rows, float* y, SimdTier tier) {
  const int64_t k = weight.k();
  const int64_t n = weight.n();
  CHECK(k % kBlock == 0 && n % kBlock == 0) << k << "x" << n;
  if (rows == 0) return;
  const PanelKernels& kernels = kernels_of(tier);
  const std::vector<float> suh = decode_scales(weight.suh, k);
  const std::vector<float> svh = decode_scales(weight.svh, n);
  std::vector<float> xh(static_cast<size_t>(rows * k));
  pool.parallel_for(rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) rotate_input_row(suh.data(), x + t * k, k, xh.data() + t * k);
  });
  pool.parallel_for(n / kPanelColumns, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> panel(static_cast<size_t>(kPanelRows) * kPanelColumns);
    std::vector<float> z(static_cast<size_t>(rows * kPanelColumns));
    for (int64_t strip = begin; strip < end; ++strip) {
      std::memset(z.data(), 0, z.size() * sizeof(float));
      for (int64_t p = 0; p < k / kPanelRows; ++p) {
        kernels.decode(weight.trellis, p, strip, panel.data());
        kernels.multiply(panel.data(), xh.data() + p * kPanelRows, k, rows, z.data());
      }
      for (int64_t t = 0; t < rows; ++t) {
        rotate_output_block(svh.data() + strip * kPanelColumns, z.data() + t * kPanelColumns,
                            y + t * n + strip * kPanelColumns);
      }
    }
  });
}

}  // namespace espalier::codec
