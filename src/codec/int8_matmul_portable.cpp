// The reference kernel: states by unpack_tile, byte sums by shifts, sums in int64.
#include <cmath>

#include "codec/int8_matmul_kernels.h"
#include "codec/int8_matmul_rows_impl.h"

namespace espalier::codec {
namespace {

// sums [16 * 128]:i16, tile column ct of the chunk, row-major [128, 16].
void decode_sums(const TrellisView& view, int64_t chunk, int64_t tile_column, int16_t* sums) {
  const uint8_t* to_row_major = ring_to_row_major();
  uint16_t states[kTileSize];
  for (int rt = 0; rt < kChunk / kTile; ++rt) {
    unpack_tile(view.tile(chunk * (kChunk / kTile) + rt, tile_column), view.k2, states);
    for (int p = 0; p < kTileSize; ++p) {
      const uint32_t x = states[p] * kMul1Multiplier;
      const uint32_t pairs = (x & 0x00FF00FFu) + ((x >> 8) & 0x00FF00FFu);
      sums[rt * kTileSize + to_row_major[p]] = static_cast<int16_t>((pairs + (pairs >> 16)) & 0xFFFFu);
    }
  }
}

void words(const TrellisView& view, const Int8Place& place, const Int8Rows& a, float* z) {
  int16_t sums[kChunk * kTile];
  for (int ct = 0; ct < kBlock / kTile; ++ct) {
    decode_sums(view, place.chunk, place.block * (kBlock / kTile) + ct, sums);
    for (int64_t r = 0; r < a.rows; ++r) {
      int64_t total[kTile] = {};
      for (int p = 0; p < kQuadsPerChunk; ++p) {
        const uint64_t quad = a.quads[r * kQuadsPerChunk + p];
        for (int j = 0; j < 4; ++j) {
          const int32_t x = static_cast<int16_t>(quad >> (16 * j));
          const int16_t* row = sums + (p / 4 * kTile + p % 4 * 2 + (j & 1) + 8 * (j >> 1)) * kTile;
          for (int c = 0; c < kTile; ++c) total[c] += row[c] * x;
        }
      }
      float* out = z + r * kBlock + ct * kTile;
      for (int c = 0; c < kTile; ++c) {
        out[c] = std::fma(static_cast<float>(static_cast<int32_t>(total[c] - a.centre[r])), a.scale[r], out[c]);
      }
    }
  }
}

}  // namespace

const Int8Kernels& int8_kernels_portable() {
  static constexpr Int8Kernels kKernels = {words, nullptr, 0, Int8Form::kPlainBytes, quantize_rows, rotate_rows};
  return kKernels;
}

}  // namespace espalier::codec
