// Dynamic shared memory beyond the 48 KiB that every kernel may use.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "device/cuda_status.cuh"
#include "device/stream.h"

namespace espalier::ops::cuda {

// Allows `kernel` to be launched with size_bytes of dynamic shared memory.
// Errors: invalid_argument naming `what` when the device has less.
template <typename Kernel>
Status allow_shared_memory(const device::Stream& stream, Kernel kernel, size_t size_bytes, const char* what) {
  if (size_bytes <= 48 * 1024) return ok_status();
  int most = 0;
  ESPALIER_CUDA_TRY(what, cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, stream.device()));
  if (size_bytes > static_cast<size_t>(most)) {
    return invalid_argument(std::string(what) + ": needs " + std::to_string(size_bytes) + " bytes of shared memory, device " +
                            std::to_string(stream.device()) + " has " + std::to_string(most) + " for a block");
  }
  ESPALIER_CUDA_TRY(what, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(size_bytes)));
  return ok_status();
}

}  // namespace espalier::ops::cuda
