// What a sequence keeps on the device between calls: window rings, compressed entries, index keys, open groups; the shapes and the rules
// of model/state.h. Compressed entries and index keys grow as the sequence does. Internal to model/cuda.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "device/buffer.h"
#include "device/stream.h"
#include "model/config.h"

namespace espalier::cuda {

struct CompressedRows {
  int64_t capacity = 0;  // entries, a multiple of 32
  device::DeviceArray<float> kv;          // [capacity, head_dim]
  device::DeviceArray<float> index_keys;  // [capacity/32, index_head_dim, 32]
  int64_t n_group_slots = 0;              // 0 at ratio 1
  device::DeviceArray<float> group_kv;    // [n_group_slots, head_dim]
  device::DeviceArray<float> group_gate;
};

class SequenceCache {
 public:
  static Result<SequenceCache> create(device::Stream& stream, const Config& config);

  // Makes room for n_entries of a kv source, keeping what is there; waits for the stream when it must move. Errors: resource_exhausted.
  Status reserve(device::Stream& stream, const Config& config, CompressedRows& rows, int64_t n_entries);
  float* window(int layer) { return windows_.data() + layer * n_slots * head_dim; }
  size_t size_bytes() const;

  int64_t n_slots = 0;  // of a window ring
  int64_t head_dim = 0;
  std::vector<CompressedRows> compressed;  // [n_layers]; only kv sources are used

 private:
  device::DeviceArray<float> windows_;  // [n_layers, n_slots, head_dim]
};

}  // namespace espalier::cuda
