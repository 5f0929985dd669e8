#include "device/graph.h"

#include <utility>

#include "device/cuda_status.cuh"

namespace espalier::device {

Result<Graph> Graph::capture(Stream& stream, const std::function<Status()>& body) {
  ESPALIER_CUDA_TRY("graph", cudaStreamBeginCapture(stream.handle(), cudaStreamCaptureModeThreadLocal));
  const Status queued = body();
  cudaGraph_t recorded = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(stream.handle(), &recorded);
  Graph graph;
  const cudaError_t made = ended == cudaSuccess ? cudaGraphInstantiate(&graph.handle_, recorded, 0) : cudaSuccess;
  if (recorded != nullptr) cudaGraphDestroy(recorded);
  RETURN_IF_ERROR(queued);
  RETURN_IF_ERROR(cuda_status(ended, "graph", "cudaStreamEndCapture", __FILE__, __LINE__));
  RETURN_IF_ERROR(cuda_status(made, "graph", "cudaGraphInstantiate", __FILE__, __LINE__));
  ESPALIER_CUDA_TRY("graph", cudaGraphUpload(graph.handle_, stream.handle()));  // not at the first launch
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
