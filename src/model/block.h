// The skeleton that every block shares: mHC around attention and experts. Internal to model/. Source: model.md
// section 4.
#pragma once

#include <functional>

#include "model/forward.h"

namespace espalier {

// Runs both sub-layers of `block` on h [n_rows, HC, D] with the carried collapse weights pre [n_rows, HC]; both are
// updated. attention(x, y): x, y [n_rows, D].
void run_block(const CallContext& context, const BlockWeights& weights, int block, Tensor& h, Tensor& pre,
               const std::function<void(const float* x, float* y)>& attention);

// Copies embedding rows of ids into every stream of h [n, HC, D] and sets pre = (1, 0, …).
void embed_rows(const Config& config, const GlobalWeights& globals, const int32_t* ids, int64_t n, Tensor& h,
                Tensor& pre);

// A mapped bf16 row as floats. Bytes may be unaligned.
void bf16_row(const ConstView& table, int64_t row, float* out);

}  // namespace espalier
