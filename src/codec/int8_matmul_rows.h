// Activations of int8_matmul: rotation, quantization and the order in which the kernels read them; internal to the codec.
#pragma once

#include <cstdint>
#include <memory>

#include "codec/exl3_tensor.h"
#include "codec/int8_matmul.h"
#include "codec/int8_matmul_kernels.h"

namespace espalier::codec {

// The quantized rows of one job, chunk by chunk.
class QuantizedRows {
 public:
  QuantizedRows(const Int8Job& job, Int8Mode mode, bool as_bytes);

  int64_t n_chunks() const { return n_chunks_; }
  // Rotates and quantizes inputs 128*chunk.. of every row. Chunks are independent.
  void quantize_chunk(int64_t chunk);
  // What a kernel needs for rows first..first+rows-1 of one chunk.
  Int8Rows rows_of(int64_t chunk, int64_t first, int64_t rows) const;
  // What z starts from: the sum over all chunks of the codebook's offset that kSumCentre leaves. NaN for a row with a
  // non-finite rotated input.
  float start(int64_t row) const;

 private:
  const Exl3View weight_;
  const float* const x_;
  const int64_t n_rows_;
  const int64_t n_chunks_;
  const Int8Mode mode_;
  const bool as_bytes_;
  std::unique_ptr<uint64_t[]> quads_;  // [chunk, row, 32]
  std::unique_ptr<float[]> scale_;     // [chunk, row]
  std::unique_ptr<float[]> shift_;     // [chunk, row]
  std::unique_ptr<int32_t[]> centre_;  // [chunk, row]
};

}  // namespace espalier::codec
