// Matrices -> EXL3 tensors on a GPU, a group at a time: the bytes of quantize_matrix for the options served here.
//
// Row and column scales are chosen on the CPU; rotation, factorisation, error feedback, trellis search and the true
// error run on the device, in the CPU's order of operations. Source: docs/decisions/cuda-quantizer.md.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "codec/quantizer.h"
#include "device/stream.h"

namespace espalier::codec {

// One matrix of a group. Pointers are host memory that outlives the call.
struct GroupMember {
  const float* weight = nullptr;    // [k, n]
  const double* hessian = nullptr;  // [k, k], null: none. Members may share one.
  std::string name;                 // as QuantizeOptions::name, which a group does not use
};

// Seconds of the last group by part, for benches. Device parts are waited for.
struct GroupTimes {
  double scales = 0, upload = 0, factor = 0, search = 0, measure = 0;
  int64_t n_float_tiles = 0;
};

// The tensors in the order of the members; the same bytes whatever the group. `fallbacks` are not recorded.
// Errors: as quantize_matrix; unimplemented, naming the option, for what only the CPU serves: a refit of scales,
// coordinate descent, several draws, a search of the spread, an output metric; resource_exhausted when the device has
// no room for the group: make it smaller.
Result<std::vector<QuantizedMatrix>> quantize_group_on_device(device::Stream& stream,
                                                              std::span<const GroupMember> members, int64_t k,
                                                              int64_t n, const QuantizeOptions& options,
                                                              ThreadPool& pool, GroupTimes* times = nullptr);

}  // namespace espalier::codec
