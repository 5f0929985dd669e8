#include "device/stream.h"

#include <algorithm>
#include <utility>

#include "device/cuda_status.cuh"
#include "device/device.h"

namespace espalier::device {
namespace {

constexpr size_t kKeptKernels = 12;  // enough to see where a step was

}  // namespace

struct Stream::Profile {
  struct Point {
    std::string step;
    const char* kernel;
    Event event;
  };
  std::vector<Point> points;  // the first one is the beginning
  Detail detail = Detail::kKernels;
  bool is_on = false;
  bool has_launches = false;  // of the current step, whole steps only
  Status status;              // of marks at the end of a step
};

Stream::Stream() = default;

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
      part_(other.part_),
      kernels_(std::move(other.kernels_)),
      profile_(std::move(other.profile_)) {}

Stream& Stream::operator=(Stream&& other) noexcept {
  std::swap(handle_, other.handle_);
  std::swap(device_, other.device_);
  std::swap(step_, other.step_);
  std::swap(part_, other.part_);
  std::swap(kernels_, other.kernels_);
  std::swap(profile_, other.profile_);
  return *this;
}

void Stream::begin_step(std::string name) {
  if (profile_ != nullptr && profile_->has_launches) {
    part_ = nullptr;
    profile_->has_launches = false;
    if (Status marked = mark(""); !marked.ok()) static_cast<void>(profile_->status = std::move(marked));
  }
  step_ = std::move(name);
  part_ = nullptr;
  kernels_.clear();
}

Status Stream::launched(const char* kernel) {
  kernels_.push_back(kernel);
  if (kernels_.size() > kKeptKernels) kernels_.erase(kernels_.begin());
  const cudaError_t code = cudaGetLastError();
  return code == cudaSuccess ? mark_launch(kernel) : failure(code, "the last launch", "cudaGetLastError");
}

Status Stream::mark_launch(const char* kernel) {
  if (profile_ == nullptr || !profile_->is_on) return ok_status();
  if (profile_->detail == Detail::kKernels) return mark(kernel);
  profile_->has_launches = true;
  return ok_status();
}

Status Stream::mark(const char* what) {
  if (profile_ == nullptr || !profile_->is_on) return ok_status();
  ASSIGN_OR_RETURN(Event event, Event::create(device_));
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  ESPALIER_CUDA_TRY("profile", cudaStreamIsCapturing(handle_, &capture));
  // Inside a graph an ordinary record only orders; an external one is seen from outside.
  const unsigned flags = capture == cudaStreamCaptureStatusNone ? cudaEventRecordDefault : cudaEventRecordExternal;
  ESPALIER_CUDA_TRY("profile", cudaEventRecordWithFlags(event.handle(), handle_, flags));
  profile_->points.push_back({step_text(), what, std::move(event)});
  profile_->has_launches = false;
  return ok_status();
}

Status Stream::begin_profile(Detail detail) {
  profile_ = std::make_unique<Profile>();
  profile_->detail = detail;
  profile_->is_on = true;
  return mark("");
}

void Stream::end_profile() {
  if (profile_ == nullptr) return;
  begin_step(step_);
  profile_->is_on = false;
}

bool Stream::is_profiling() const { return profile_ != nullptr && profile_->is_on; }

Result<std::vector<Stream::Timed>> Stream::profile() {
  RETURN_IF_ERROR(synchronize());
  std::vector<Timed> out;
  if (profile_ == nullptr || profile_->points.empty()) return Result<std::vector<Timed>>(std::move(out));
  RETURN_IF_ERROR(profile_->status);
  for (size_t i = 1; i < profile_->points.size(); ++i) {
    const Profile::Point& p = profile_->points[i];
    ASSIGN_OR_RETURN(const double ms, p.event.milliseconds_since(profile_->points[0].event));
    out.push_back({p.step, p.kernel, 1e3 * ms});
  }
  // What is recorded into a graph is announced before the graph runs.
  std::stable_sort(out.begin(), out.end(), [](const Timed& a, const Timed& b) { return a.microseconds < b.microseconds; });
  for (size_t i = out.size(); i-- > 1;) out[i].microseconds -= out[i - 1].microseconds;
  return Result<std::vector<Timed>>(std::move(out));
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
  const std::string what = "step '" + step_text() + "' on device " + std::to_string(device_) + ", found by " + found_by +
                           ", kernels since the last wait: " + (kernels.empty() ? "none" : kernels);
  return cuda_status(static_cast<cudaError_t>(code), what, call, __FILE__, __LINE__);
}

Status Stream::copy_to_device(void* device_to, const void* host_from, size_t size_bytes) {
  ESPALIER_CUDA_TRY("step '" + step_text() + "'", cudaMemcpyAsync(device_to, host_from, size_bytes, cudaMemcpyHostToDevice, handle_));
  return mark_launch("copy up");
}

Status Stream::copy_to_host(void* host_to, const void* device_from, size_t size_bytes) {
  ESPALIER_CUDA_TRY("step '" + step_text() + "'", cudaMemcpyAsync(host_to, device_from, size_bytes, cudaMemcpyDeviceToHost, handle_));
  return mark("copy down");  // the end of a step too
}

Status Stream::copy_on_device(void* to, const void* from, size_t size_bytes) {
  ESPALIER_CUDA_TRY("step '" + step_text() + "'", cudaMemcpyAsync(to, from, size_bytes, cudaMemcpyDeviceToDevice, handle_));
  return mark_launch("copy");
}

Status Stream::fill_bytes(void* to, int byte, size_t size_bytes) {
  ESPALIER_CUDA_TRY("step '" + step_text() + "'", cudaMemsetAsync(to, byte, size_bytes, handle_));
  return mark_launch("fill");
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
