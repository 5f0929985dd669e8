// Device memory with an owner: plain allocations, freed when the owner goes. Contents are undefined until written.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "device/stream.h"

namespace espalier::device {

class DeviceBuffer {
 public:
  DeviceBuffer() = default;  // empty
  // `what` is named in errors: "expert weights". Zero bytes give an empty buffer.
  // Errors: resource_exhausted with the size asked for and what is free.
  static Result<DeviceBuffer> allocate(int device, size_t size_bytes, std::string_view what);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;

  void* data() const { return data_; }
  size_t size_bytes() const { return size_bytes_; }

 private:
  void* data_ = nullptr;
  size_t size_bytes_ = 0;
};

// n elements of T; T must be plain bytes (numbers, structs of numbers).
template <typename T>
class DeviceArray {
 public:
  DeviceArray() = default;
  static Result<DeviceArray> allocate(int device, size_t n, std::string_view what) {
    ASSIGN_OR_RETURN(DeviceBuffer buffer, DeviceBuffer::allocate(device, n * sizeof(T), what));
    DeviceArray out;
    out.buffer_ = std::move(buffer);
    out.n_ = n;
    return Result<DeviceArray>(std::move(out));  // nvcc does not move into it implicitly
  }
  // Allocates and queues the copy; `values` may go as soon as the call returns.
  static Result<DeviceArray> upload(Stream& stream, std::span<const T> values, std::string_view what) {
    ASSIGN_OR_RETURN(DeviceArray out, allocate(stream.device(), values.size(), what));
    RETURN_IF_ERROR(stream.copy_to_device(out.data(), values.data(), values.size_bytes()));
    return Result<DeviceArray>(std::move(out));
  }
  // Waits for the stream and copies everything back.
  Result<std::vector<T>> download(Stream& stream) const {
    std::vector<T> out(n_);
    RETURN_IF_ERROR(stream.copy_to_host(out.data(), data(), n_ * sizeof(T)));
    RETURN_IF_ERROR(stream.synchronize());
    return out;
  }

  T* data() const { return static_cast<T*>(buffer_.data()); }
  size_t size() const { return n_; }

 private:
  DeviceBuffer buffer_;
  size_t n_ = 0;
};

}  // namespace espalier::device
