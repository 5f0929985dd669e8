#include "ops/fake_quant.h"

#include <algorithm>

#include "base/simd_tier.h"
#include "ops/cpu/kernels.h"
#include "ops/parallel.h"
#include "tensor/float_formats.h"

namespace espalier::ops {
void fake_quant(ThreadPool& pool, const FakeQuantParams& p) {
  if (active_simd_tier() == SimdTier::kReference) return reference::fake_quant(p);
  const Kernels& k = kernels();
  const auto quantise = p.format == FakeQuantFormat::kAct   ? k.quantise_act
                        : p.format == FakeQuantFormat::kFp4 ? k.quantise_fp4
                                                            : k.quantise_kv4;
  const int64_t group = fake_quant_group(p.format);
  for_rows(pool, p.n_rows, 2.0 * static_cast<double>(p.d), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t i = 0; i < p.d; i += group) quantise(p.x + t * p.d + i, std::min(group, p.d - i));
    }
  });
}

void round_to_bf16(ThreadPool& pool, float* x, int64_t n) {
  for_rows(pool, n, 1.0, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) x[i] = round_bf16(x[i]);
  });
}

}  // namespace espalier::ops
