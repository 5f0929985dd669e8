// Inner loops of int8_matmul, one set per instruction set; internal to the codec. All sets give the same bits.
//
// Activations come in quads: tile row t (0..3) of a 16-row tile needs the four inputs 2t, 2t+1, 2t+8, 2t+9, because
// these are the rows of four consecutive ring positions. A chunk of 128 inputs has 32 quads: four int16, or, for few
// rows of plain activations, where summing the bytes of the codebook first does not pay, four int8, each twice (8
// bytes) or four times (16 bytes).
#pragma once

#include <cstdint>
#include <span>

#include "codec/int8_matmul.h"
#include "codec/trellis.h"

namespace espalier::codec {

inline constexpr int kChunk = 128;  // inputs that share a scale: the Hadamard block
inline constexpr int kQuadsPerChunk = kChunk / 4;
inline constexpr int kSumCentre = 510;  // of the byte sums, 0..1020

enum class Int8Form : uint8_t { kPlainBytes, kPlainSplats, kPlainWords, kResidualWords };
// In units of 8 bytes, for one row and chunk.
constexpr int64_t quads_size(Int8Form form) {
  return form == Int8Form::kPlainSplats ? 2 * kQuadsPerChunk : kQuadsPerChunk;
}

// Quantized rows of one chunk, written by `quantize`; arrays over rows.
struct Int8Output {
  uint64_t* quads;  // [rows, quads_size]
  float* scale;     // kappa * d (/ 254)
  float* shift;     // what the codebook's offset beyond kSumCentre adds to z; NaN when an input is not finite
  int32_t* centre;  // 510 * sum of a
};

// The same, read by the products.
//
// Overflow: |a| <= 254*127 + 127 = 32385 and |s - 510| <= 510, so |T| <= 128 * 510 * 32385 = 2114092800 < 2^31. Kernels
// may sum s*a with wrap-around and subtract 510 * sum a at the end (mod 2^32 the same number).
struct Int8Rows {
  const uint64_t* quads;
  const float* scale;
  const int32_t* centre;
  int64_t rows;
};

// Inputs 128*chunk.. and outputs 128*block.. of a matrix.
struct Int8Place {
  int64_t chunk;
  int64_t block;
  int64_t
      next_words;  // from each tile to the one that is needed a block later: far apart in memory, so worth a prefetch
};

struct Int8Kernels {
  // z [rows, 128] (stride 128) = fma(T, scale, z), for words and for bytes (null: not provided).
  void (*words)(const TrellisView& view, const Int8Place& place, const Int8Rows& a, float* z);
  void (*bytes)(const TrellisView& view, const Int8Place& place, const Int8Rows& a, float* z);
  int max_byte_rows;
  Int8Form byte_form;  // what `bytes` reads
  // Rows x [rows, 128] (stride) of one chunk, suh [128]:f16 -> rotated and quantized.
  void (*quantize)(const uint16_t* suh, const float* x, int64_t stride, int64_t rows, Int8Form form,
                   const Int8Output& out);
  // y [rows, 128] (stride) = had(z) * svh, z [rows, 128].
  void (*rotate)(const uint16_t* svh, const float* z, int64_t rows, float* y, int64_t stride);
};

const Int8Kernels& int8_kernels_portable();
const Int8Kernels& int8_kernels_avx2();
const Int8Kernels& int8_kernels_avx512();
const Int8Kernels& int8_kernels_columns_avx512();
const Int8Kernels& int8_kernels_neon();

// int8_matmul with the given loops, which the machine must be able to run.
void int8_matmul_with(const Int8Kernels& kernels, ThreadPool& pool, std::span<const Int8Job> jobs, Int8Mode mode);

}  // namespace espalier::codec
