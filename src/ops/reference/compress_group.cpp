#include "ops/compress_group.h"

#include <algorithm>
#include <cmath>

namespace espalier::ops::reference {

void compress_group(const CompressGroupParams& p) {
  for (int64_t g = 0; g < p.n_groups; ++g) {
    for (int64_t d = 0; d < p.d; ++d) {
      double top = -INFINITY;
      for (int64_t i = 0; i < p.ratio; ++i) top = std::max(top, static_cast<double>(p.gate[g * p.ratio + i][d]));
      double total = 0;
      double sum = 0;
      for (int64_t i = 0; i < p.ratio; ++i) {
        const double e = std::exp(static_cast<double>(p.gate[g * p.ratio + i][d]) - top);
        total += e;
        sum += e * static_cast<double>(p.kv[g * p.ratio + i][d]);
      }
      p.out[g * p.d + d] = static_cast<float>(sum / total);
    }
  }
}

}  // namespace espalier::ops::reference
