// Inner loops of int8_matmul, one set per instruction set; internal to the codec. All sets give the same bits.
//
// Activations come in quads: tile row t (0..3) of a 16-row tile needs the four inputs 2t, 2t+1, 2t+8, 2t+9, because these are
// the rows of four consecutive ring positions. A chunk of 128 inputs has 32 quads of 8 bytes, in one of two forms:
//   words: the four activations as int16;
//   bytes: the four activations as int8, each twice (kPlain with few rows, where summing the bytes first does not pay).
#pragma once

#include <cstdint>

#include "codec/trellis.h"

namespace espalier::codec {

inline constexpr int kChunk = 128;  // inputs that share a scale: the Hadamard block
inline constexpr int kQuadsPerChunk = kChunk / 4;
inline constexpr int kSumCentre = 510;  // of the byte sums, 0..1020

// Overflow: |a| <= 254*127 + 127 = 32385 and |s - 510| <= 510, so |T| <= 128 * 510 * 32385 = 2114092800 < 2^31. Kernels may sum
// s*a with wrap-around and subtract 510 * sum a at the end (mod 2^32 the same number).
struct Int8Rows {
  const uint64_t* quads = nullptr;  // [rows, 32] of one chunk
  const float* scale = nullptr;     // [rows], kappa * d (/ 254)
  const int32_t* centre = nullptr;  // [rows], 510 * sum of a over the chunk
  int64_t rows = 0;
};

struct Int8Kernels {
  // z [rows, 128] (stride 128) = fma(T, scale, z) for inputs 128*chunk.. and outputs 128*block.. of the matrix.
  void (*words)(const TrellisView& view, int64_t chunk, int64_t block, const Int8Rows& a, float* z);
  // The same from byte quads, for at most max_byte_rows rows (0: never).
  void (*bytes)(const TrellisView& view, int64_t chunk, int64_t block, const Int8Rows& a, float* z);
  int max_byte_rows;
};

const Int8Kernels& int8_kernels_portable();
const Int8Kernels& int8_kernels_avx2();
const Int8Kernels& int8_kernels_avx512();
const Int8Kernels& int8_kernels_neon();

}  // namespace espalier::codec
