#include "device/branch.h"

#include "device/cuda_status.cuh"

namespace espalier::device {

Result<Branches> Branches::create(int device, int n) {
  Branches branches;
  for (int i = 0; i < n; ++i) {
    ASSIGN_OR_RETURN(Stream stream, Stream::create(device));
    stream.begin_step("branch " + std::to_string(i) + " of a pass");
    branches.streams_.push_back(std::move(stream));
  }
  for (int i = 0; i < n + 1; ++i) {
    ASSIGN_OR_RETURN(Event event, Event::create(device));
    branches.events_.push_back(std::move(event));
  }
  return Result<Branches>(std::move(branches));
}

Status Branches::fork(Stream& from, int n, int first) {
  RETURN_IF_ERROR(events_[0].record(from));
  for (int i = first; i < first + n; ++i) ESPALIER_CUDA_TRY("branch", cudaStreamWaitEvent(stream(i).handle(), events_[0].handle(), 0));
  return ok_status();
}

Status Branches::join(int i, Stream& to) {
  Event& done = events_[static_cast<size_t>(i) + 1];
  RETURN_IF_ERROR(done.record(stream(i)));
  ESPALIER_CUDA_TRY("branch", cudaStreamWaitEvent(to.handle(), done.handle(), 0));
  return ok_status();
}

}  // namespace espalier::device
