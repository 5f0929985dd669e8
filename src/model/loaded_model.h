// A model on the CPU or on a GPU, for callers that only feed ids and read logits: both give the same bits in exact products.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/status.h"
#include "base/thread_pool.h"
#include "model/config.h"
#include "model/forward.h"
#include "model/numerics.h"
#include "model/weights.h"
#include "tensor/view.h"

namespace espalier {

namespace cuda {
class DeviceModel;
}

class LoadedModel {
 public:
  // `device`: a GPU's index; absent: the CPU. Errors: as Model::load and cuda::DeviceModel::load.
  static Result<LoadedModel> load(const std::string& dir, const LoadOptions& options, std::optional<int> device, ThreadPool& pool);
  // A model that someone else owns and that outlives this.
  LoadedModel(const Model& model) : cpu_(&model) {}  // NOLINT: implicit by design

  const Config& config() const;

  // One sequence from position 0: takes ids and returns the logits [n, V]:f32 of all of them. The model and the pool must outlive it.
  // Errors: as forward(). Threads: one at a time.
  using Feed = std::function<Result<Tensor>(std::span<const int32_t> ids)>;
  Result<Feed> open(Numerics numerics, ThreadPool& pool) const;

 private:
  LoadedModel() = default;
  std::shared_ptr<const Model> owned_;
  const Model* cpu_ = nullptr;
  std::shared_ptr<const cuda::DeviceModel> gpu_;
};

}  // namespace espalier
