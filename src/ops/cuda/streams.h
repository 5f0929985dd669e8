// The residual streams on a GPU: mHC coefficients, collapse, expansion, and Engram's gated addition.
//
// Parameters as in ops/mhc.h and ops/engram_gate.h with all pointers in device memory; promises and errors as in ops/cuda/rows.h.
#pragma once

#include "base/status.h"
#include "device/stream.h"
#include "ops/cuda/order.h"
#include "ops/engram_gate.h"
#include "ops/mhc.h"

namespace espalier::ops::cuda {

// Errors also: invalid_argument for more than kMaxStreams streams.
Status mhc_coefficients(device::Stream& stream, const MhcCoefficientsParams& p, Order order = Order::kCpu);
Status mhc_collapse(device::Stream& stream, const MhcCollapseParams& p);
// The same followed by rms_norm with `weight` [d_model], one launch; the bits are those of both.
Status mhc_collapse_normalised(device::Stream& stream, const MhcCollapseParams& p, const float* weight, double eps, Order order = Order::kCpu);
Status mhc_expand(device::Stream& stream, const MhcExpandParams& p);
Status engram_gate(device::Stream& stream, const EngramGateParams& p, Order order = Order::kCpu);

}  // namespace espalier::ops::cuda
