// One weight matrix W in the form y[n, out] = x[n, in] * W, made from any stored form: FP8 blocks, MXFP4, BF16, F32 or
// EXL3.
//
// fp32 arithmetic with a fixed order: every output is one chain of fused multiply-adds over ascending input index, so a
// row's result does not depend on the other rows, the threads or the SIMD tier (ops/matmul.h; EXL3: codec/matmul.h, the
// chain runs in the rotated basis). Weights are packed once, or kept in their stored form and unpacked at every use
// (kStored), which gives the same bits and is meant for networks that do not fit in memory unpacked. EXL3 matrices of the
// mul1 codebook may be multiplied in integers instead (products.h), packed in either case and with the same independence
// of rows, threads and tier (codec/int8_matmul.h). Threads: immutable after making; concurrent apply() is fine as long as each caller has its own pool.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/status.h"
#include "base/thread_pool.h"
#include "model/names.h"
#include "model/products.h"
#include "tensor/view.h"

namespace espalier {

namespace codec {
struct Exl3Tensor;
struct Exl3View;
}  // namespace codec

enum class LinearForm { kFp8, kMxfp4, kBf16, kF32, kExl3 };

enum class WeightResidency {
  kUnpacked,  // fp32 panels in memory
  kStored,    // stored bytes (memory-mapped) are unpacked at every apply
};

// A native matrix as its checkpoint stores it: rows [row_begin, row_begin + out) of a larger one.
struct StoredMatrix {
  LinearForm form = LinearForm::kF32;
  DType dtype = DType::kF32;          // of a dense weight
  const uint8_t* weight = nullptr;    // first needed row; bytes may be unaligned
  const uint8_t* scale = nullptr;     // first scale row of the whole stored matrix; null for dense weights
  int64_t in = 0;
  int64_t out = 0;
  int64_t row_begin = 0;
  int64_t block_rows = 1;             // row o has scale row (row_begin + o) / block_rows
  int64_t block_cols = 32;
  int64_t scale_cols = 0;
};

class Linear {
 public:
  Linear();
  ~Linear();
  Linear(Linear&&) noexcept;
  Linear& operator=(Linear&&) noexcept;

  // weight [out, in]:F8_E4M3 with scale [ceil(out_total/block_rows), ceil(in/block_cols)]:F8_E8M0.
  // Rows [row_begin, row_begin + out) of the stored matrix are taken (slices of wo_a).
  // All makers: `name` is the tensor's name for messages; data_loss when an element is NaN or infinite, naming it and
  // its index.
  static Result<Linear> from_fp8(const std::string& name, const ConstView& weight, const ConstView& scale,
                                 int64_t block_rows, int64_t block_cols, int64_t row_begin, int64_t out,
                                 WeightResidency residency);
  // weight [out, in/2]:I8 (even element in the low nibble), scale [out, in/32]:F8_E8M0.
  static Result<Linear> from_mxfp4(const std::string& name, const ConstView& weight, const ConstView& scale,
                                   WeightResidency residency);
  // weight [out, in]:BF16, F16 or F32. Rows as in from_fp8.
  static Result<Linear> from_dense(const std::string& name, const ConstView& weight, int64_t row_begin, int64_t out,
                                   WeightResidency residency);
  // w [in, out] float, for example a reconstructed matrix.
  static Linear from_kn(const float* w, int64_t in, int64_t out);
  // EXL3 kUnpacked keeps the trellis values as fp32 panels between the two rotations; kStored decodes at every apply.
  // Both give the same bits. The owning form copies nothing; the view's memory must outlive the Linear. `products` other
  // than kExact keeps mul1 matrices packed; other codebooks stay exact.
  static Linear from_exl3(codec::Exl3Tensor tensor, WeightResidency residency, Products products = Products::kExact);
  static Linear from_exl3(const codec::Exl3View& view, WeightResidency residency, Products products = Products::kExact);

  bool empty() const { return impl_ == nullptr; }
  int64_t in() const;
  int64_t out() const;
  LinearForm form() const;
  // Stored size in bits of the matrix (EXL3: trellis, signs and scales; MXFP4 and FP8: codes and scales).
  int64_t stored_bits() const;
  // What apply() uses: kExact for all but EXL3 matrices of the mul1 codebook.
  Products products() const;
  // EXL3 only, else null.
  const codec::Exl3View* exl3() const;
  // Where a native matrix lies, also when it is kept unpacked; valid as long as the memory it was made from. Null for EXL3 and from_kn.
  const StoredMatrix* stored() const;

  // y[n_rows, out] = x[n_rows, in] * W, fp32. y must not alias x.
  void apply(ThreadPool& pool, const float* x, int64_t n_rows, float* y) const;
  // One product of a list. y must not alias any x of the list.
  struct Job {
    const Linear* linear;
    const float* x;  // [n_rows, in]
    int64_t n_rows;
    float* y;  // [n_rows, out]
  };
  // apply() for every job, the same bits; those in integers share the threads, so many small ones cost little.
  static void apply_all(ThreadPool& pool, std::span<const Job> jobs);
  // w[in, out] := the matrix in fp32 (EXL3: reconstructed).
  void weight_kn(ThreadPool& pool, float* w) const;

 private:
  struct Impl;
  explicit Linear(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace espalier
