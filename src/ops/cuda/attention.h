// Attention over explicit key lists, and the pooling of token groups, on a GPU.
//
// Parameters as in ops/attention.h and ops/compress_group.h with all pointers in device memory, the rows that key and group lists
// point to included. A null key is an empty place in both forms. Promises and errors as in ops/cuda/rows.h.
#pragma once

#include "base/status.h"
#include "device/stream.h"
#include "ops/attention.h"
#include "ops/compress_group.h"

namespace espalier::ops::cuda {

// max_keys: no list is longer (the lists' lengths live on the device).
// Errors also: invalid_argument when max_keys does not fit the shared memory of a block (about 9000 on an H200, 2000 at least).
Status attention(device::Stream& stream, const AttentionParams& p, int64_t max_keys);
Status compress_group(device::Stream& stream, const CompressGroupParams& p);

}  // namespace espalier::ops::cuda
