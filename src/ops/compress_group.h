// Pooling of a group of tokens into one latent: per channel a softmax over the group's gates weights its values.
// exponentials in double rounded to float, sums in float in token order. Source: model.md 5.3.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"

namespace espalier::ops {

struct CompressGroupParams {
  const float* const* kv = nullptr;    // [n_groups * ratio] rows [d], tokens ascending within a group
  const float* const* gate = nullptr;  // the same
  float* out = nullptr;                // [n_groups, d]
  int64_t n_groups = 0;
  int64_t ratio = 0;
  int64_t d = 0;
};

void compress_group(ThreadPool& pool, const CompressGroupParams& p);

namespace reference {
void compress_group(const CompressGroupParams& p);
}

}  // namespace espalier::ops
