// module: codec
// Any bytes given as the tensors of an EXL3 linear are decoded or refused; what is accepted packs back to the same words.
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "codec/exl3_tensor.h"

namespace {

using namespace espalier;

// Input: byte 0 last dimension / 8, byte 1 which parts exist, bytes 2..3 tile counts / 8, byte 4 dtype; the rest fills the tensors.
struct Parts {
  std::vector<uint8_t> trellis, suh, svh;
  int32_t marker = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 16) return 0;
  const int64_t last = 8 * static_cast<int64_t>(data[0]);
  const int64_t kt = data[2] % 3 * 8 + (data[2] >> 7);
  const int64_t nt = data[3] % 3 * 8 + (data[3] >> 7);
  const DType dtype = (data[4] & 15) == 0 ? DType::kF16 : DType::kI16;
  Parts bytes;
  const auto fill = [&](std::vector<uint8_t>& out, size_t n, size_t offset) {
    out.resize(n);
    for (size_t i = 0; i < n; ++i) out[i] = data[5 + (i + offset) % (size - 5)];
  };
  if (kt * nt * last > (1 << 20)) return 0;
  fill(bytes.trellis, static_cast<size_t>(2 * kt * nt * last), 0);
  fill(bytes.suh, static_cast<size_t>(32 * kt), 3);
  fill(bytes.svh, static_cast<size_t>(32 * nt), 5);
  std::memcpy(&bytes.marker, data + 5, sizeof bytes.marker);
  if ((data[1] & 64) != 0) bytes.marker = static_cast<int32_t>(codec::kMul1Multiplier);

  codec::Exl3Parts parts;
  parts.trellis = ConstView{bytes.trellis.data(), dtype, {kt, nt, last}};
  if ((data[1] & 1) == 0) parts.suh = ConstView{bytes.suh.data(), DType::kF16, {kt * 16}};
  if ((data[1] & 2) == 0) parts.svh = ConstView{bytes.svh.data(), DType::kF16, {nt * 16}};
  if ((data[1] & 4) != 0) parts.mul1 = ConstView{&bytes.marker, DType::kI32, {}};
  if ((data[1] & 8) != 0) parts.mcg = ConstView{&bytes.marker, DType::kI32, {}};
  if ((data[1] & 16) != 0) parts.su = ConstView{bytes.suh.data(), DType::kI16, {kt}};
  if ((data[1] & 32) != 0) parts.sv = ConstView{bytes.svh.data(), DType::kI16, {nt}};

  const Result<codec::Exl3Tensor> tensor = codec::load_exl3("fuzz", parts);
  if (!tensor.ok()) {
    CHECK(!tensor.error().message().empty());
    return 0;
  }
  const codec::TrellisView view = tensor->view().trellis;
  std::vector<uint16_t> states(static_cast<size_t>(view.k * view.n));
  codec::unpack_states(view, states.data());
  std::vector<uint16_t> back(static_cast<size_t>(codec::tile_words(view.k2)));
  for (int64_t t = 0; t < kt * nt; ++t) {
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
