#include "codec/strip_product_impl.h"

namespace espalier::codec {

void strip_product_avx2(const StripProduct& product) {
  product_all<4, 4>(product);
}

}  // namespace espalier::codec
