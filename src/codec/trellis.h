// The packed trellis: 16x16 tiles, each a ring of 256*K bits in which position p has the 16-bit state that ends with its own
// K bits. Everything here is exact bit work; scales and rotations live in exl3_tensor.h.
//
// Widths are counted in half bits, k2 = 2*K: 2..16 even for K = 1..8, and 3, 5, 7 for K = 1.5, 2.5, 3.5 (mul1 only).
// A tile has 8*k2 uint16 words on disk (little-endian 32-bit words of ring bits, most significant bit first).
// Source: docs/formats/exl3.md, "Ring" and "Permutation".
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"
#include "codec/codebook.h"

namespace espalier::codec {

inline constexpr int kTile = 16;          // tile edge
inline constexpr int kTileSize = 256;     // positions of a ring
inline constexpr int kBlock = 128;        // edge of a Hadamard block; k and n are multiples of it

// True for the widths that exist: even 2..16, and 3, 5, 7.
constexpr bool is_width(int k2) { return k2 == 3 || k2 == 5 || k2 == 7 || (k2 >= 2 && k2 <= 16 && k2 % 2 == 0); }
// "3" or "2.5".
std::string width_text(int k2);
// 3 -> 6, 2.5 -> 5. Errors: invalid_argument for anything that is not a width.
Result<int> width_from_bits(double bits);

constexpr int64_t tile_words(int k2) { return int64_t{8} * k2; }  // uint16 words of a tile
constexpr int64_t trellis_words(int64_t k, int64_t n, int k2) { return (k / kTile) * (n / kTile) * tile_words(k2); }

// Packed matrix [k, n] that someone else owns: tile (kt, nt) is words[(kt*(n/16) + nt) * 8*k2 ...].
struct TrellisView {
  const uint16_t* words = nullptr;  // [k/16, n/16, 8*k2]:u16
  int64_t k = 0;                    // in features, multiple of 128
  int64_t n = 0;                    // out features, multiple of 128
  int k2 = 0;                       // width in half bits
  Codebook codebook = Codebook::kMul1;

  const uint16_t* tile(int64_t kt, int64_t nt) const { return words + (kt * (n / kTile) + nt) * tile_words(k2); }
};

// Ring position -> row-major element 16*r + c of the tile, and back.
const uint8_t* ring_to_row_major();
const uint8_t* row_major_to_ring();

// New ring bits at position p, and the end bit (exclusive) of its window.
constexpr int step_bits(int k2, int p) { return k2 % 2 == 0 ? k2 / 2 : k2 / 2 + (p & 1); }
constexpr int window_end(int k2, int p) { return k2 % 2 == 0 ? (p + 1) * (k2 / 2) : (p >> 1) * k2 + ((p & 1) ? k2 : k2 / 2); }

// tile [8*k2]:u16 -> states [256]:u16 in ring order. k2 must be a width.
void unpack_tile(const uint16_t* tile, int k2, uint16_t* states);
// states [256]:u16 in ring order -> tile [8*k2]:u16; only the new bits of every state are read.
void pack_tile(const uint16_t* states, int k2, uint16_t* tile);
// state(p) >> bits(p) == state(p-1) & mask, all the way round: the states form a ring.
bool is_ring(const uint16_t* states, int k2);

// Whole matrix to codebook values, row-major [k, n], before rotation and scales (upstream's `inner`).
// Threads: pure. Cost: O(k*n).
void decode_inner(const TrellisView& view, float* out);
void decode_inner_f16(const TrellisView& view, uint16_t* out);
// All states, [k/16, n/16, 256]:u16 in ring order.
void unpack_states(const TrellisView& view, uint16_t* out);

}  // namespace espalier::codec
