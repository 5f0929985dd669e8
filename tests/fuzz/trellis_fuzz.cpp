// module: codec
// Any bytes given as the tensors of an EXL3 linear are decoded or refused; what is accepted packs back to the same
// words.
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "exl3_bytes.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace espalier;
  fuzz::LinearBytes bytes;
  if (!fuzz::make_linear(data, size, &bytes)) return 0;
  const Result<codec::Exl3Tensor> tensor = codec::load_exl3("fuzz", bytes.parts);
  if (!tensor.ok()) {
    CHECK(!tensor.error().message().empty());
    return 0;
  }
  const codec::TrellisView view = tensor->view().trellis;
  std::vector<uint16_t> states(static_cast<size_t>(view.k * view.n));
  codec::unpack_states(view, states.data());
  std::vector<uint16_t> back(static_cast<size_t>(codec::tile_words(view.k2)));
  for (int64_t t = 0; t < view.k * view.n / codec::kTileSize; ++t) {
    CHECK(codec::is_ring(states.data() + t * codec::kTileSize, view.k2));
    codec::pack_tile(states.data() + t * codec::kTileSize, view.k2, back.data());
    CHECK(std::memcmp(back.data(), view.words + t * codec::tile_words(view.k2), 2 * back.size()) == 0);
  }
  ThreadPool pool(1);
  std::vector<float> weight(static_cast<size_t>(view.k * view.n));
  codec::decode_weight(tensor->view(), weight.data(), pool);
  for (float w : weight) CHECK(w == w && w - w == 0.0f);
  return 0;
}
