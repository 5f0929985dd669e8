// Work beside a stream: other streams that start from a point of it and that it waits for. Inside a recorded graph the branches become
// branches of the graph.
#pragma once

#include <vector>

#include "base/status.h"
#include "device/stream.h"

namespace espalier::device {

class Branches {
 public:
  static Result<Branches> create(int device, int n);

  int n() const { return static_cast<int>(streams_.size()); }
  Stream& stream(int i) { return streams_[static_cast<size_t>(i)]; }
  // What is queued on branches first to first + n - 1 from here on starts after everything that is on `from`.
  Status fork(Stream& from, int n, int first = 0);
  // What is queued on `to` from here on starts after everything that is on branch i.
  Status join(int i, Stream& to);

 private:
  std::vector<Stream> streams_;
  std::vector<Event> events_;  // the fork's, then one per branch
};

}  // namespace espalier::device
