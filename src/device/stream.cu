#include "device/stream.h"

#include <algorithm>
#include <utility>

#include "device/cuda_status.cuh"
#include "device/device.h"

namespace espalier::device {
namespace {

constexpr size_t kKeptKernels = 12;  // enough to see where a step was

}  // namespace

Result<Stream> Stream::create(int device) {
  ASSIGN_OR_RETURN(const DeviceInfo info, find_device(device));
  const ScopedDevice scope(device);
  ESPALIER_CUDA_TRY(info.text(), scope.status());
  Stream stream;
  stream.device_ = device;
  ESPALIER_CUDA_TRY(info.text(), cudaStreamCreateWithFlags(&stream.handle_, cudaStreamNonBlocking));
  return Result<Stream>(std::move(stream));
}

Stream::~Stream() {
  if (handle_ != nullptr) cudaStreamDestroy(handle_);
}

Stream::Stream(Stream&& other) noexcept
    : handle_(std::exchange(other.handle_, nullptr)),
      device_(other.device_),
      step_(std::move(other.step_)),
      kernels_(std::move(other.kernels_)) {}

Stream& Stream::operator=(Stream&& other) noexcept {
  std::swap(handle_, other.handle_);
  std::swap(device_, other.device_);
  std::swap(step_, other.step_);
  std::swap(kernels_, other.kernels_);
  return *this;
}

void Stream::begin_step(std::string name) {
  step_ = std::move(name);
  kernels_.clear();
}

Status Stream::launched(const char* kernel) {
  kernels_.push_back(kernel);
  if (kernels_.size() > kKeptKernels) kernels_.erase(kernels_.begin());
  const cudaError_t code = cudaGetLastError();
  return code == cudaSuccess ? ok_status() : failure(code, "the last launch", "cudaGetLastError");
}

Status Stream::synchronize() {
  const cudaError_t code = cudaStreamSynchronize(handle_);
  if (code != cudaSuccess) return failure(code, "waiting", "cudaStreamSynchronize");
  kernels_.clear();
  return ok_status();
}

Status Stream::failure(int code, const char* found_by, const char* call) const {
  std::string kernels;
  for (const char* name : kernels_) kernels += (kernels.empty() ? "" : ", ") + std::string(name);
  const std::string what = "step '" + step_ + "' on device " + std::to_string(device_) + ", found by " + found_by +
                           ", kernels since the last wait: " + (kernels.empty() ? "none" : kernels);
  return cuda_status(static_cast<cudaError_t>(code), what, call, __FILE__, __LINE__);
}

Status Stream::copy_to_device(void* device_to, const void* host_from, size_t size_bytes) {
  ESPALIER_CUDA_TRY("step '" + step_ + "'", cudaMemcpyAsync(device_to, host_from, size_bytes, cudaMemcpyHostToDevice, handle_));
  return ok_status();
}

Status Stream::copy_to_host(void* host_to, const void* device_from, size_t size_bytes) {
  ESPALIER_CUDA_TRY("step '" + step_ + "'", cudaMemcpyAsync(host_to, device_from, size_bytes, cudaMemcpyDeviceToHost, handle_));
  return ok_status();
}

Status Stream::copy_on_device(void* to, const void* from, size_t size_bytes) {
  ESPALIER_CUDA_TRY("step '" + step_ + "'", cudaMemcpyAsync(to, from, size_bytes, cudaMemcpyDeviceToDevice, handle_));
  return ok_status();
}

Status Stream::fill_bytes(void* to, int byte, size_t size_bytes) {
  ESPALIER_CUDA_TRY("step '" + step_ + "'", cudaMemsetAsync(to, byte, size_bytes, handle_));
  return ok_status();
}

Result<Event> Event::create(int device) {
  const ScopedDevice scope(device);
  ESPALIER_CUDA_TRY("event", scope.status());
  Event event;
  ESPALIER_CUDA_TRY("event", cudaEventCreate(&event.handle_));
  return Result<Event>(std::move(event));
}

Event::~Event() {
  if (handle_ != nullptr) cudaEventDestroy(handle_);
}

Event::Event(Event&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}

Event& Event::operator=(Event&& other) noexcept {
  std::swap(handle_, other.handle_);
  return *this;
}

Status Event::record(Stream& stream) {
  ESPALIER_CUDA_TRY("event", cudaEventRecord(handle_, stream.handle()));
  return ok_status();
}

Result<double> Event::milliseconds_since(const Event& start) const {
  ESPALIER_CUDA_TRY("event", cudaEventSynchronize(handle_));
  float ms = 0;
  ESPALIER_CUDA_TRY("event", cudaEventElapsedTime(&ms, start.handle_, handle_));
  return double{ms};
}

}  // namespace espalier::device
