#include "codec/trellis.h"

#include <array>
#include <cmath>

namespace espalier::codec {
namespace {

struct Permutation {
  std::array<uint8_t, kTileSize> to_row_major{};
  std::array<uint8_t, kTileSize> to_ring{};
};

// Position 8*lane + j lies where lane `lane` of an m16n8k16 tensor-core B operand keeps its j-th element.
constexpr Permutation make_permutation() {
  Permutation result;
  for (int p = 0; p < kTileSize; ++p) {
    const int lane = p / 8;
    const int j = p % 8;
    const int row = 2 * (lane % 4) + (j & 1) + 8 * ((j >> 1) & 1);
    const int column = lane / 4 + 8 * ((j >> 2) & 1);
    result.to_row_major[p] = static_cast<uint8_t>(16 * row + column);
    result.to_ring[16 * row + column] = static_cast<uint8_t>(p);
  }
  return result;
}

constexpr Permutation kPermutation = make_permutation();

// 32-bit word i of the tile; the file keeps words little-endian.
uint32_t load_word(const uint16_t* tile, int i) {
  return static_cast<uint32_t>(tile[2 * i]) | (static_cast<uint32_t>(tile[2 * i + 1]) << 16);
}

}  // namespace

std::string width_text(int k2) { return std::to_string(k2 / 2) + (k2 % 2 != 0 ? ".5" : ""); }

Result<int> width_from_bits(double bits) {
  const double doubled = bits * 2;
  if (std::isfinite(doubled) && doubled >= 2 && doubled <= 16 && doubled == std::floor(doubled)) {
    const int k2 = static_cast<int>(doubled);
    if (is_width(k2)) return k2;
  }
  return invalid_argument("width: expected 1, 2, ... 8, or 1.5, 2.5, 3.5 bits, found " + std::to_string(bits));
}

const uint8_t* ring_to_row_major() { return kPermutation.to_row_major.data(); }
const uint8_t* row_major_to_ring() { return kPermutation.to_ring.data(); }

void unpack_tile(const uint16_t* tile, int k2, uint16_t* states) {
  const int n_words = 4 * k2;
  const int ring_bits = 128 * k2;
  for (int p = 0; p < kTileSize; ++p) {
    const int last = window_end(k2, p) + ring_bits;  // exclusive; moved up by one turn so that the start is not negative
    const int first = last - 16;
    const int low_word = (last - 1) / 32;
    const uint64_t high = load_word(tile, (first / 32) % n_words);
    const uint64_t low = load_word(tile, low_word % n_words);
    const int shift = (low_word + 1) * 32 - last;
    states[p] = static_cast<uint16_t>(((high << 32) | low) >> shift);
  }
}

void pack_tile(const uint16_t* states, int k2, uint16_t* tile) {
  const int n_units = 8 * k2;
  for (int i = 0; i < n_units; ++i) tile[i] = 0;
  for (int p = 0; p < kTileSize; ++p) {
    const int bits = step_bits(k2, p);
    const int end = window_end(k2, p);
    for (int b = 0; b < bits; ++b) {  // bit b counts from the end of the window
      const int ring_bit = end - 1 - b;
      const int word_bit = 31 - ring_bit % 32;
      const int unit = 2 * (ring_bit / 32) + (word_bit >= 16 ? 1 : 0);
      tile[unit] = static_cast<uint16_t>(tile[unit] | (((states[p] >> b) & 1u) << (word_bit % 16)));
    }
  }
}

bool is_ring(const uint16_t* states, int k2) {
  for (int p = 0; p < kTileSize; ++p) {
    const int bits = step_bits(k2, p);
    const uint32_t before = states[(p + kTileSize - 1) % kTileSize];
    if ((static_cast<uint32_t>(states[p]) >> bits) != (before & ((65536u >> bits) - 1u))) return false;
  }
  return true;
}

namespace {

template <typename T>
void decode_with_table(const TrellisView& view, const T* table, T* out) {
  uint16_t states[kTileSize];
  for (int64_t kt = 0; kt < view.k / kTile; ++kt) {
    for (int64_t nt = 0; nt < view.n / kTile; ++nt) {
      unpack_tile(view.tile(kt, nt), view.k2, states);
      T* corner = out + kt * kTile * view.n + nt * kTile;
      for (int e = 0; e < kTileSize; ++e) {
        corner[(e / kTile) * view.n + e % kTile] = table[states[kPermutation.to_ring[e]]];
      }
    }
  }
}

}  // namespace

void decode_inner(const TrellisView& view, float* out) {
  decode_with_table(view, codebook_table_f32(view.codebook), out);
}

void decode_inner_f16(const TrellisView& view, uint16_t* out) {
  decode_with_table(view, codebook_table_f16(view.codebook), out);
}

void unpack_states(const TrellisView& view, uint16_t* out) {
  const int64_t n_tiles = (view.k / kTile) * (view.n / kTile);
  for (int64_t t = 0; t < n_tiles; ++t) {
    unpack_tile(view.words + t * tile_words(view.k2), view.k2, out + t * kTileSize);
  }
}

}  // namespace espalier::codec
