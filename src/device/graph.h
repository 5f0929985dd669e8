// A recorded sequence of launches that replays as one: no host work between its kernels.
#pragma once

#include <functional>

#include "base/status.h"
#include "device/stream.h"

struct CUgraphExec_st;

namespace espalier::device {

class Graph {
 public:
  // Records what `body` queues on `stream` without running it. Memory named in the launches must outlive the graph and must not
  // be allocated, freed or waited for inside `body`.
  // Errors: those of `body`, or what the runtime says.
  static Result<Graph> capture(Stream& stream, const std::function<Status()>& body);
  ~Graph();
  Graph(Graph&& other) noexcept;
  Graph& operator=(Graph&& other) noexcept;

  Status launch(Stream& stream) const;

 private:
  Graph() = default;
  CUgraphExec_st* handle_ = nullptr;
};

}  // namespace espalier::device
