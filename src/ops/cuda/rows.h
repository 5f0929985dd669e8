// Operations on rows, on a GPU: RMS norm, rotary embedding, clamped SwiGLU, the cache and activation formats.
//
// The parameters are those of ops/<op>.h with all pointers in device memory, 4-byte aligned. Every call queues one launch on the stream;
// results have the CPU's bits (one fixed order of every sum, the same elementary functions) unless another order is asked for, and a row's bits do not depend on the
// other rows. Zero rows queue nothing.
// Errors: what the device says about the launch; invalid_argument for sizes beyond a launch.
#pragma once

#include "base/status.h"
#include "device/stream.h"
#include "ops/cuda/order.h"
#include "ops/fake_quant.h"
#include "ops/rms_norm.h"
#include "ops/rope.h"
#include "ops/swiglu.h"

namespace espalier::ops::cuda {

Status rms_norm(device::Stream& stream, const RmsNormParams& p, Order order = Order::kCpu);
Status rope(device::Stream& stream, const RopeParams& p);
Status swiglu(device::Stream& stream, const SwigluParams& p);
Status fake_quant(device::Stream& stream, const FakeQuantParams& p);
// x[i] = bf16(x[i]).
Status round_to_bf16(device::Stream& stream, float* x, int64_t n);

}  // namespace espalier::ops::cuda
