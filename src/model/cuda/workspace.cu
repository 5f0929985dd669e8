#include "model/cuda/workspace.h"

#include <algorithm>

namespace espalier::cuda {
namespace {

constexpr size_t kSlabBytes = size_t{32} << 20;
constexpr size_t kAlignment = 256;

}  // namespace

Result<void*> Workspace::take_bytes(size_t size_bytes) {
  const size_t size = std::max((size_bytes + kAlignment - 1) / kAlignment * kAlignment, kAlignment);
  while (at_.slab < slabs_.size() && at_.used + size > slabs_[at_.slab].size_bytes()) at_ = {at_.slab + 1, 0};
  if (at_.slab == slabs_.size()) {
    ASSIGN_OR_RETURN(device::DeviceBuffer slab, device::DeviceBuffer::allocate(device_, std::max(size, kSlabBytes), "workspace of a forward pass"));
    slabs_.push_back(std::move(slab));
  }
  void* piece = static_cast<uint8_t*>(slabs_[at_.slab].data()) + at_.used;
  at_.used += size;
  return piece;
}

}  // namespace espalier::cuda
