#include "device/device.h"

#include "device/cuda_status.cuh"

namespace espalier::device {
namespace {

std::string version_text(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }

Result<int> count_devices() {
  int n = 0;
  const cudaError_t code = cudaGetDeviceCount(&n);
  if (code == cudaSuccess && n > 0) return n;
  cudaGetLastError();  // the answer is in `code`; a later check must not find it again
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  if (driver == 0) return unavailable("no CUDA driver is installed; the CPU is used unless a GPU and its driver are present");
  if (driver < runtime && code == cudaErrorInsufficientDriver) {
    return unavailable("the CUDA driver serves version " + version_text(driver) + ", this build needs " + version_text(runtime) +
                       "; update the driver");
  }
  return unavailable(std::string("no CUDA device is visible (") + cudaGetErrorString(code) +
                     "); check nvidia-smi and CUDA_VISIBLE_DEVICES");
}

Result<DeviceInfo> describe(int index) {
  cudaDeviceProp p;
  ESPALIER_CUDA_TRY("device " + std::to_string(index), cudaGetDeviceProperties(&p, index));
  DeviceInfo info;
  info.index = index;
  info.name = p.name;
  info.major = p.major;
  info.minor = p.minor;
  info.n_multiprocessors = p.multiProcessorCount;
  info.shared_bytes_per_block = static_cast<int>(p.sharedMemPerBlockOptin);
  info.l2_bytes = p.l2CacheSize;
  info.memory_bytes = p.totalGlobalMem;
  cudaDeviceGetAttribute(&info.clock_khz, cudaDevAttrClockRate, index);
  cudaDriverGetVersion(&info.driver_version);
  cudaRuntimeGetVersion(&info.runtime_version);
  return Result<DeviceInfo>(std::move(info));
}

}  // namespace

std::string DeviceInfo::text() const {
  return name + " (device " + std::to_string(index) + ", sm_" + std::to_string(major) + std::to_string(minor) + ", " +
         std::to_string(n_multiprocessors) + " SMs)";
}

Result<std::vector<DeviceInfo>> list_devices() {
  ASSIGN_OR_RETURN(const int n, count_devices());
  std::vector<DeviceInfo> all;
  for (int i = 0; i < n; ++i) {
    ASSIGN_OR_RETURN(DeviceInfo info, describe(i));
    all.push_back(std::move(info));
  }
  return Result<std::vector<DeviceInfo>>(std::move(all));
}

Result<DeviceInfo> find_device(int index) {
  ASSIGN_OR_RETURN(const int n, count_devices());
  if (index < 0 || index >= n) {
    return invalid_argument("device " + std::to_string(index) + " does not exist; " + std::to_string(n) +
                            (n == 1 ? " is" : " are") + " visible, numbered from 0");
  }
  return describe(index);
}

Result<uint64_t> free_memory_bytes(int index) {
  const ScopedDevice scope(index);
  ESPALIER_CUDA_TRY("device " + std::to_string(index), scope.status());
  size_t free = 0, total = 0;
  ESPALIER_CUDA_TRY("device " + std::to_string(index), cudaMemGetInfo(&free, &total));
  return uint64_t{free};
}

Status cuda_status(cudaError_t code, std::string_view what, const char* call, const char* file, int line) {
  if (code == cudaSuccess) return ok_status();
  std::string_view name(call);
  name = name.substr(0, name.find('('));
  std::string_view place(file);
  if (const size_t slash = place.rfind('/'); slash != std::string_view::npos) place.remove_prefix(slash + 1);
  std::string message = std::string(what) + ": " + std::string(name) + ": " + cudaGetErrorString(code) + " (" +
                        cudaGetErrorName(code) + ", " + std::string(place) + ":" + std::to_string(line) + ")";
  switch (code) {
    case cudaErrorMemoryAllocation: return resource_exhausted(std::move(message));
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorDevicesUnavailable: return unavailable(std::move(message));
    case cudaErrorNoKernelImageForDevice:
      return unavailable(message + "; add the device's architecture to ESPALIER_CUDA_ARCHITECTURES and build again");
    default: return internal_error(std::move(message));
  }
}

}  // namespace espalier::device
