#include "ops/matmul.h"

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "base/simd_tier.h"
#include "ops/cpu/kernels.h"

namespace espalier::ops {

PackedMatrix pack_rows(int64_t k, int64_t n, const std::function<void(int64_t o, float* out)>& row) {
  PackedMatrix m{k, n, Tensor(DType::kF32, {(n + kPanelWidth - 1) / kPanelWidth, k, kPanelWidth})};
  std::vector<float> values(static_cast<size_t>(k));
  float* panels = m.panels.f32();
  for (int64_t o = 0; o < n; ++o) {
    row(o, values.data());
    float* to = panels + o / kPanelWidth * k * kPanelWidth + o % kPanelWidth;
    for (int64_t i = 0; i < k; ++i) to[i * kPanelWidth] = values[static_cast<size_t>(i)];
  }
  return m;
}

PackedMatrix pack_kn(const float* w, int64_t k, int64_t n) {
  PackedMatrix m{k, n, Tensor(DType::kF32, {(n + kPanelWidth - 1) / kPanelWidth, k, kPanelWidth})};
  float* panels = m.panels.f32();
  for (int64_t p = 0; p * kPanelWidth < n; ++p) {
    const int64_t width = std::min(kPanelWidth, n - p * kPanelWidth);
    for (int64_t i = 0; i < k; ++i) {
      std::copy_n(w + i * n + p * kPanelWidth, width, panels + (p * k + i) * kPanelWidth);
    }
  }
  return m;
}

void unpack_kn(const PackedMatrix& packed, float* w) {
  const float* panels = packed.panels.f32();
  for (int64_t p = 0; p * kPanelWidth < packed.n; ++p) {
    const int64_t width = std::min(kPanelWidth, packed.n - p * kPanelWidth);
    for (int64_t i = 0; i < packed.k; ++i) {
      std::copy_n(panels + (p * packed.k + i) * kPanelWidth, width, w + i * packed.n + p * kPanelWidth);
    }
  }
}

void matmul(ThreadPool& pool, const MatmulParams& p) {
  CHECK(p.weight != nullptr) << "matmul without a weight";
  const PackedMatrix& w = *p.weight;
  if (p.n_rows == 0 || w.n == 0) return;
  if (active_simd_tier() == SimdTier::kReference) return reference::matmul(p);
  const Kernels& kernel = kernels();
  const int64_t n_panels = (w.n + kPanelWidth - 1) / kPanelWidth;
  MatmulBlock whole = {p.x, w.k, w.panels.f32(), w.k, w.n, p.y, w.n, 0, p.n_rows, 0, n_panels};
  const double work = static_cast<double>(p.n_rows) * static_cast<double>(w.k) * static_cast<double>(w.n);
  if (work < 1e6 || pool.n_threads() == 1) {
    // Panels outside, so that one panel stays in cache for all rows.
    constexpr int64_t kGroup = 4;
    for (int64_t panel = 0; panel < n_panels; panel += kGroup) {
      whole.panel_begin = panel;
      whole.panel_end = std::min(panel + kGroup, n_panels);
      kernel.matmul(whole);
    }
    return;
  }
  const int64_t panels_per_task = 4;
  const int64_t rows_per_task = 96;
  const int64_t panel_tasks = (n_panels + panels_per_task - 1) / panels_per_task;
  const int64_t row_tasks = (p.n_rows + rows_per_task - 1) / rows_per_task;
  pool.parallel_for(panel_tasks * row_tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      MatmulBlock b = whole;
      b.row_begin = task % row_tasks * rows_per_task;
      b.row_end = std::min(b.row_begin + rows_per_task, p.n_rows);
      b.panel_begin = task / row_tasks * panels_per_task;
      b.panel_end = std::min(b.panel_begin + panels_per_task, n_panels);
      kernel.matmul(b);
    }
  });
}

}  // namespace espalier::ops
