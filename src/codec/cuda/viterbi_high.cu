#include "codec/cuda/viterbi_kernel.cuh"

namespace espalier::codec {

std::vector<SearchVariant> search_variants_high() {
  using cuda::make_variant;
  using cuda::SearchShape;
  return {make_variant<SearchShape<10, 2, false>>(), make_variant<SearchShape<12, 2, false>>(),
          make_variant<SearchShape<14, 2, false>>(), make_variant<SearchShape<16, 2, false>>()};
}

}  // namespace espalier::codec
