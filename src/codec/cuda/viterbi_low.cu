#include "codec/cuda/viterbi_kernel.cuh"

namespace espalier::codec {

std::vector<SearchVariant> search_variants_low() {
  using cuda::make_variant;
  using cuda::SearchShape;
  return {make_variant<SearchShape<2, 1, true>>(), make_variant<SearchShape<2, 1, true, false>>(),
          make_variant<SearchShape<3, 1, true>>(), make_variant<SearchShape<3, 1, true, false>>(),
          make_variant<SearchShape<4, 2, true>>(), make_variant<SearchShape<4, 1, true>>()};
}

}  // namespace espalier::codec
