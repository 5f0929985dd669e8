#include "device/pinned.h"

#include <string>

#include "device/cuda_status.cuh"

namespace espalier::device {

Result<PinnedBuffer> PinnedBuffer::allocate(size_t size_bytes, std::string_view what) {
  PinnedBuffer buffer;
  if (size_bytes == 0) return Result<PinnedBuffer>(std::move(buffer));
  const cudaError_t code = cudaMallocHost(&buffer.data_, size_bytes);
  if (code == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return resource_exhausted(std::string(what) + ": cannot pin " + std::to_string(size_bytes) +
                              " bytes of host memory; use shorter chunks, or free memory");
  }
  ESPALIER_CUDA_TRY(what, code);
  buffer.size_bytes_ = size_bytes;
  return Result<PinnedBuffer>(std::move(buffer));
}

PinnedBuffer::~PinnedBuffer() {
  if (data_ != nullptr) cudaFreeHost(data_);
}

PinnedBuffer::PinnedBuffer(PinnedBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_bytes_(std::exchange(other.size_bytes_, 0)) {}

PinnedBuffer& PinnedBuffer::operator=(PinnedBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  return *this;
}

}  // namespace espalier::device
