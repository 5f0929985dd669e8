// A queue of device work, and where its errors are told.
//
// A kernel that faults is noticed later, by whoever waits next. A Stream therefore remembers the step that its owner announced and
// the kernels launched since the last wait, and `synchronize` blames that step instead of the next innocent call. After a device fault
// the CUDA context is lost: every later call fails, and only a new process helps.
// Threads: one stream belongs to one thread at a time.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"

struct CUstream_st;
struct CUevent_st;

namespace espalier::device {

class Stream {
 public:
  // Errors: as find_device, or what the runtime says.
  static Result<Stream> create(int device = 0);
  ~Stream();
  Stream(Stream&& other) noexcept;
  Stream& operator=(Stream&& other) noexcept;

  CUstream_st* handle() const { return handle_; }  // a cudaStream_t
  int device() const { return device_; }

  // Names the work that follows, for errors: "layer 7 experts".
  void begin_step(std::string name);
  // Names a part of the step, for errors and profiles: "layer 7, experts". `name` has static storage.
  void begin_part(const char* name) { part_ = name; }
  // To be called right after every launch with the kernel's name (static storage). Reports a refused launch; an
  // asynchronous fault may also appear here, and is then attributed to the step, not to this kernel.
  Status launched(const char* kernel);
  // Waits for everything queued. Errors name the step, the kernels launched since the last wait, and the device.
  Status synchronize();

  // Queue copies of size_bytes; host memory may be pageable (the call then returns when it has been read).
  Status copy_to_device(void* device_to, const void* host_from, size_t size_bytes);
  Status copy_to_host(void* host_to, const void* device_from, size_t size_bytes);
  Status copy_on_device(void* to, const void* from, size_t size_bytes);
  Status fill_bytes(void* to, int byte, size_t size_bytes);

  // Times the launches and copies on the device from here on, in the step that is then announced; or whole steps only, which costs less
  // time itself. What is recorded into a graph meanwhile is timed at every replay of it.
  enum class Detail { kKernels, kSteps };
  Status begin_profile(Detail detail = Detail::kKernels);
  // A point of the profile of its own: the work and the waiting before it is called `what` (static storage).
  Status mark(const char* what);
  void end_profile();
  bool is_profiling() const;
  struct Timed {
    std::string step;
    const char* kernel;   // empty for a step
    double microseconds;  // from the end of the work before it to its own end
  };
  // Waits for the stream; the last run of everything between begin_profile and end_profile, in the order of its end.
  Result<std::vector<Timed>> profile();

 private:
  Stream();
  Status failure(int code, const char* found_by, const char* call) const;
  Status mark_launch(const char* kernel);

  CUstream_st* handle_ = nullptr;
  int device_ = 0;
  std::string step_ = "start";
  const char* part_ = nullptr;
  std::string step_text() const { return part_ == nullptr ? step_ : step_ + ", " + part_; }
  std::vector<const char*> kernels_;  // since the last wait; the last few are kept
  struct Profile;
  std::unique_ptr<Profile> profile_;
};

// A point in a stream, for timing. Errors: what the runtime says.
class Event {
 public:
  static Result<Event> create(int device = 0);
  ~Event();
  Event(Event&& other) noexcept;
  Event& operator=(Event&& other) noexcept;

  CUevent_st* handle() const { return handle_; }  // a cudaEvent_t
  Status record(Stream& stream);
  // Waits for this event. Milliseconds of device time from `start`, which must have been recorded before it.
  Result<double> milliseconds_since(const Event& start) const;

 private:
  Event() = default;
  CUevent_st* handle_ = nullptr;
};

}  // namespace espalier::device
