#include "codec/cuda/viterbi_kernel.cuh"

namespace espalier::codec {

std::vector<SearchVariant> search_variants_middle() {
  using cuda::make_variant;
  using cuda::SearchShape;
  return {make_variant<SearchShape<5, 1, false>>(), make_variant<SearchShape<6, 2, false>>(),
          make_variant<SearchShape<6, 1, false>>(), make_variant<SearchShape<7, 1, false>>(),
          make_variant<SearchShape<8, 2, false>>()};
}

}  // namespace espalier::codec
