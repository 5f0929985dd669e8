// An EXL3 matrix in device memory, in the layout of windows.h, and the kernels that turn it back into numbers.
//
// Results: inner values are bit for bit those of codec/trellis.h; weights in the original basis are computed in fp32 and differ from
// decode_weight's by roundings only.
// Source: docs/formats/exl3.md.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "codec/exl3_tensor.h"
#include "device/buffer.h"
#include "device/stream.h"

namespace espalier::codec::cuda {

// A matrix that someone else owns; all pointers are device memory. Cheap to copy, usable in kernels.
struct DeviceMatrix {
  const uint32_t* blocks = nullptr;  // [n/64, k/32, 32*k2]:u32, 16-byte aligned
  const uint16_t* suh = nullptr;     // [k]:f16, 16-byte aligned
  const uint16_t* svh = nullptr;     // [n]:f16, 16-byte aligned
  int64_t k = 0, n = 0;
  int k2 = 0;
  Codebook codebook = Codebook::kMul1;
};

// Rearranges a trellis in file order, in device memory, into the device layout.
// words [k/16, n/16, 8*k2]:u16, 4-byte aligned; blocks: layout_words(k, n, k2) words, 16-byte aligned, must not alias.
Status to_device_layout(device::Stream& stream, const TrellisView& words, uint32_t* blocks);

// One matrix and its memory.
class Matrix {
 public:
  // Copies and rearranges; waits until it is done. Errors: resource_exhausted, or what the device says.
  static Result<Matrix> upload(device::Stream& stream, const Exl3View& tensor);
  const DeviceMatrix& view() const { return view_; }

 private:
  device::DeviceArray<uint32_t> blocks_;
  device::DeviceArray<uint16_t> suh_, svh_;
  DeviceMatrix view_;
};

// out [k, n]:f16 codebook values, before rotation and scales; 16-byte aligned.
Status decode_inner_f16(device::Stream& stream, const DeviceMatrix& matrix, uint16_t* out);

enum class WeightType { kF32, kF16, kBF16 };
// out [k, n] in the original basis, row-major, rounded once from fp32 to the type; 16-byte aligned.
Status decode_weight(device::Stream& stream, const DeviceMatrix& matrix, WeightType type, void* out);

}  // namespace espalier::codec::cuda
