// CUDA return codes as Status, and the device as a scope. For .cu files only.
#pragma once

#include <cuda_runtime.h>

#include <string>
#include <string_view>

#include "base/status.h"

namespace espalier::device {

// Ok for cudaSuccess. Otherwise "<what>: cudaMalloc: out of memory (cudaErrorMemoryAllocation, file.cu:12)" with a code that
// says what the caller can do: resource_exhausted, unavailable, or internal.
Status cuda_status(cudaError_t code, std::string_view what, const char* call, const char* file, int line);

// Makes `device` current for the calling thread and restores the former one.
class ScopedDevice {
 public:
  explicit ScopedDevice(int device) {
    if (cudaGetDevice(&before_) != cudaSuccess) before_ = -1;
    if (before_ != device) status_ = cudaSetDevice(device);
  }
  ~ScopedDevice() {
    if (before_ >= 0) cudaSetDevice(before_);
  }
  ScopedDevice(const ScopedDevice&) = delete;
  ScopedDevice& operator=(const ScopedDevice&) = delete;
  cudaError_t status() const { return status_; }

 private:
  int before_ = -1;
  cudaError_t status_ = cudaSuccess;
};

}  // namespace espalier::device

// Returns the failed call's Status from the enclosing function.
#define ESPALIER_CUDA_TRY(what, call) \
  RETURN_IF_ERROR(::espalier::device::cuda_status((call), (what), #call, __FILE__, __LINE__))
