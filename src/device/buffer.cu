#include "device/buffer.h"

#include <string>
#include <utility>

#include "device/cuda_status.cuh"
#include "device/device.h"

namespace espalier::device {

Result<DeviceBuffer> DeviceBuffer::allocate(int device, size_t size_bytes, std::string_view what) {
  DeviceBuffer buffer;
  if (size_bytes == 0) return Result<DeviceBuffer>(std::move(buffer));
  const ScopedDevice scope(device);
  ESPALIER_CUDA_TRY(what, scope.status());
  const cudaError_t code = cudaMalloc(&buffer.data_, size_bytes);
  if (code == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    const Result<uint64_t> free = free_memory_bytes(device);
    return resource_exhausted(std::string(what) + ": device " + std::to_string(device) + " cannot give " + std::to_string(size_bytes) +
                              " bytes" + (free.ok() ? ", it has " + std::to_string(*free) + " free" : "") +
                              "; use a smaller pack or context, or free the device");
  }
  ESPALIER_CUDA_TRY(what, code);
  buffer.size_bytes_ = size_bytes;
  return Result<DeviceBuffer>(std::move(buffer));
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ != nullptr) cudaFree(data_);
}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_bytes_(std::exchange(other.size_bytes_, 0)) {}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  return *this;
}

}  // namespace espalier::device
