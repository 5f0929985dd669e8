#include "codec/strip_product_impl.h"

namespace espalier::codec {

void strip_product_avx512(const StripProduct& product) {
  product_all<8, 8>(product);
}

}  // namespace espalier::codec
