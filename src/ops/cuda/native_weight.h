// A weight matrix in device memory in the form in which a checkpoint stores it: FP8 with block scales, MXFP4, BF16, F16 or F32.
//
// Values are those of model/linear.h: code times scale, exact in fp32. Source: model.md 2.2.
#pragma once

#include <cstdint>

namespace espalier::ops::cuda {

enum class NativeForm : int32_t { kF32, kF16, kBf16, kFp8, kMxfp4 };

// Someone else's memory; cheap to copy, usable in kernels.
struct NativeWeight {
  NativeForm form = NativeForm::kF32;
  const uint8_t* weight = nullptr;  // [out, in] elements, 16-byte aligned; MXFP4: [out, in/2] bytes, the even element in the low nibble
  const uint8_t* scale = nullptr;   // FP8, MXFP4: e8m0 [rows of blocks, scale_cols]; row o uses (row_begin + o) / block_rows
  int64_t in = 0;
  int64_t out = 0;
  int64_t row_begin = 0;
  int64_t block_rows = 1;
  int64_t block_cols = 32;
  int64_t scale_cols = 0;
};

}  // namespace espalier::ops::cuda
