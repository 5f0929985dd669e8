// Device memory of a forward pass in flight: taken piece by piece, given back to a mark. Grows once; a call of a size seen before
// allocates nothing. Internal to model/cuda.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "device/buffer.h"

namespace espalier::cuda {

class Workspace {
 public:
  struct Mark {
    size_t slab = 0;
    size_t used = 0;
  };

  explicit Workspace(int device) : device_(device) {}

  // n elements, 256-byte aligned, contents undefined; valid until reset to a mark taken before. Errors: resource_exhausted.
  template <typename T>
  Result<T*> take(int64_t n) {
    ASSIGN_OR_RETURN(void* piece, take_bytes(static_cast<size_t>(n) * sizeof(T)));
    return static_cast<T*>(piece);
  }

  Mark mark() const { return at_; }
  // Work in stream order may still use what is given back: what is taken next is written later in the same stream.
  void reset(Mark mark) { at_ = mark; }

 private:
  Result<void*> take_bytes(size_t size_bytes);

  int device_;
  std::vector<device::DeviceBuffer> slabs_;
  Mark at_;
};

}  // namespace espalier::cuda
