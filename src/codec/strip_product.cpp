#include "codec/strip_product.h"

#include "codec/strip_product_impl.h"

namespace espalier::codec {

void strip_product_baseline(const StripProduct& product) {
  product_all<2, 1>(product);
}

void strip_product(const StripProduct& product, SimdTier tier) {
  switch (tier) {
#if defined(__x86_64__)
    case SimdTier::kAvx512:
      return strip_product_avx512(product);
    case SimdTier::kAvx2:
      return strip_product_avx2(product);
#endif
    default:
      return strip_product_baseline(product);
  }
}

}  // namespace espalier::codec
