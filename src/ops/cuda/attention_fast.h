// Attention over key lists in an order of sums that many threads share (Order::kFast): places in tiles of 32, tiles merged in ascending
// order by a running maximum.
//
// Parameters and promises as in ops/cuda/attention.h, but for the bits: within roundings of the CPU's. A row's bits depend on the row and its
// list only; empty tiles and empty places change nothing. Not for the online form.
#pragma once

#include "base/status.h"
#include "device/stream.h"
#include "ops/attention.h"

namespace espalier::ops::cuda {

// Heads of 128, 256 or 512 channels whose rows are 16-byte aligned.
bool can_attend_fast(const AttentionParams& p);
// Floats of scratch for lists of up to max_keys places.
int64_t attention_parts_size(const AttentionParams& p, int64_t max_keys);
// Queues one or two launches. Errors: invalid_argument when can_attend_fast is false; what the device says.
Status attention_fast(device::Stream& stream, const AttentionParams& p, int64_t max_keys, float* parts);

}  // namespace espalier::ops::cuda
