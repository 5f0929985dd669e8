// What accelerators there are. The module `device` is the host side of a GPU: memory, streams, events, graphs, and errors that
// name the step they belong to. Its headers need no CUDA header, so any .cpp file may use them.
//
// In a build without CUDA only this header is implemented, and it answers `unavailable`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace espalier::device {

struct DeviceInfo {
  int index = 0;                 // ordinal among the visible devices
  std::string name;              // "NVIDIA H200"
  int major = 0, minor = 0;      // compute capability, 9 and 0
  int n_multiprocessors = 0;
  int shared_bytes_per_block = 0;  // largest shared memory of one block, after opting in
  int l2_bytes = 0;
  int clock_khz = 0;             // highest clock of the multiprocessors
  uint64_t memory_bytes = 0;     // all of it; free_memory_bytes asks what is left
  int driver_version = 0;        // 13000: the driver serves CUDA 13.0
  int runtime_version = 0;       // 13000: built with CUDA 13.0

  // "NVIDIA H200 (device 0, sm_90, 132 SMs)"
  std::string text() const;
};

// All visible devices, at least one.
// Errors: unavailable, saying why: no CUDA in this build, no driver, a driver older than the build, no device.
Result<std::vector<DeviceInfo>> list_devices();
// Errors: as above; invalid_argument for an index that does not exist.
Result<DeviceInfo> find_device(int index);
// Free memory of a device, bytes.
Result<uint64_t> free_memory_bytes(int index);

}  // namespace espalier::device
