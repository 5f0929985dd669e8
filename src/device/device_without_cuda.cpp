#include "device/device.h"

namespace espalier::device {
namespace {

Status no_cuda() {
  return unavailable("this build has no CUDA; install the CUDA toolkit and configure with -DESPALIER_CUDA=ON to use a GPU");
}

}  // namespace

std::string DeviceInfo::text() const { return name; }
Result<std::vector<DeviceInfo>> list_devices() { return no_cuda(); }
Result<DeviceInfo> find_device(int) { return no_cuda(); }
Result<uint64_t> free_memory_bytes(int) { return no_cuda(); }

}  // namespace espalier::device
