#include "device/graph.h"

#include <utility>

#include "device/cuda_status.cuh"

namespace espalier::device {

Result<Graph> Graph::capture(Stream& stream, const std::function<Status()>& body) {
  ESPALIER_CUDA_TRY("graph", cudaStreamBeginCapture(stream.handle(), cudaStreamCaptureModeThreadLocal));
  Status queued = body();
  cudaGraph_t recorded = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(stream.handle(), &recorded);
  Graph graph;
  if (queued.ok()) queued = cuda_status(ended, "graph", "cudaStreamEndCapture", __FILE__, __LINE__);
  if (queued.ok()) {
    queued = cuda_status(cudaGraphInstantiate(&graph.handle_, recorded, 0), "graph", "cudaGraphInstantiate", __FILE__, __LINE__);
  }
  if (recorded != nullptr) cudaGraphDestroy(recorded);
  RETURN_IF_ERROR(queued);
  return Result<Graph>(std::move(graph));
}

Graph::~Graph() {
  if (handle_ != nullptr) cudaGraphExecDestroy(handle_);
}

Graph::Graph(Graph&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}

Graph& Graph::operator=(Graph&& other) noexcept {
  std::swap(handle_, other.handle_);
  return *this;
}

Status Graph::launch(Stream& stream) const {
  ESPALIER_CUDA_TRY("graph", cudaGraphLaunch(handle_, stream.handle()));
  return ok_status();
}

}  // namespace espalier::device
