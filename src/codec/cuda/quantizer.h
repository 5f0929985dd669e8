// Matrices -> EXL3 tensors on a GPU, a group at a time: the bytes of quantize_matrix for the options served here.
//
// Row and column scales are chosen on the CPU; that and the uploads of the next group may run on another thread while the
// device works on this one (prepare_group). Rotation, factorisation, error feedback, trellis search and the true
// error run on the device, in the CPU's order of operations. Source: docs/decisions/cuda-quantizer.md.
#pragma once

#include <cstdint>
#include <memory>
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

struct GroupState;  // quantizer_group.h

// A group whose scales are chosen and whose weights and Hessians are on the device.
class PreparedGroup {
 public:
  explicit PreparedGroup(std::unique_ptr<GroupState> state);
  ~PreparedGroup();
  PreparedGroup(PreparedGroup&&) noexcept;
  PreparedGroup& operator=(PreparedGroup&&) noexcept;
  GroupState& state() { return *state_; }

 private:
  std::unique_ptr<GroupState> state_;
};

// All that the CPU does for a group, and the uploads; members' memory may go afterwards. Threads: may run while another
// thread quantizes a prepared group, with a stream and a pool that nobody else uses meanwhile.
// Errors: as quantize_group_on_device.
Result<PreparedGroup> prepare_group(device::Stream& stream, std::span<const GroupMember> members, int64_t k, int64_t n,
                                    const QuantizeOptions& options, ThreadPool& pool, GroupTimes* times = nullptr);

// All that the device does for it. Adds to the times.
Result<std::vector<QuantizedMatrix>> quantize_prepared_group(device::Stream& stream, PreparedGroup group,
                                                             GroupTimes* times = nullptr);

// Both, one after the other. The tensors in the order of the members; the same bytes whatever the group. `fallbacks` are not recorded.
// Errors: as quantize_matrix; unimplemented, naming the option, for what only the CPU serves: a refit of scales,
// coordinate descent, several draws, a search of the spread, an output metric; resource_exhausted when the device has
// no room for the group: make it smaller.
Result<std::vector<QuantizedMatrix>> quantize_group_on_device(device::Stream& stream,
                                                              std::span<const GroupMember> members, int64_t k,
                                                              int64_t n, const QuantizeOptions& options,
                                                              ThreadPool& pool, GroupTimes* times = nullptr);

}  // namespace espalier::codec
