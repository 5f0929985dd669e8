// X^T X of calibration rows on a GPU: the bytes of HessianAccumulator (stages/quantize/hessian.h).
//
// Rows are cut into chunks of 1,024 in the order given; inside a chunk every element is one fp32 FMA chain over
// ascending rows, chunks are added in order in fp64. Rows with a number that is not finite are left out.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "device/buffer.h"
#include "device/stream.h"

namespace espalier::codec {

class DeviceHessian {
 public:
  static constexpr int64_t kChunkRows = 1024;

  // k: width of a row. Errors: resource_exhausted.
  static Result<DeviceHessian> create(device::Stream& stream, int64_t k);

  // x [n_rows, k]:f32 in device memory. scale: [n_rows] factors s >= 0 in host memory, or null for 1; a row counts as s
  // * x in fp32. Waits for the stream once.
  Status add(device::Stream& stream, const float* x, int64_t n_rows, const float* scale = nullptr);
  // The sum [k, k], symmetric, in device memory; ends the last chunk. Valid until the next add or the object's end.
  // Queued.
  Result<const double*> finish(device::Stream& stream);

  int64_t rows() const { return rows_; }
  int64_t dropped() const { return dropped_; }
  double weight_sum() const { return weight_sum_; }
  double weight_square_sum() const { return weight_square_sum_; }

 private:
  Status flush(device::Stream& stream);

  int64_t k_ = 0, filled_ = 0, rows_ = 0, dropped_ = 0;
  double weight_sum_ = 0, weight_square_sum_ = 0;
  device::DeviceArray<float> chunk_;  // [1024, k]
  device::DeviceArray<double> sum_;   // [k, k], lower triangle until finish
};

}  // namespace espalier::codec
