// Host memory that a device can read by itself: copies from it are queued without passing through another buffer.
#pragma once

#include <cstddef>
#include <string_view>
#include <utility>

#include "base/status.h"

namespace espalier::device {

class PinnedBuffer {
 public:
  PinnedBuffer() = default;  // empty
  // Errors: resource_exhausted with the size asked for.
  static Result<PinnedBuffer> allocate(size_t size_bytes, std::string_view what);
  ~PinnedBuffer();
  PinnedBuffer(PinnedBuffer&& other) noexcept;
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept;

  void* data() const { return data_; }
  size_t size_bytes() const { return size_bytes_; }

 private:
  void* data_ = nullptr;
  size_t size_bytes_ = 0;
};

}  // namespace espalier::device
