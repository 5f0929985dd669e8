#include "model/loaded_model.h"

#include <utility>

#include "model/cuda/network.h"

namespace espalier {

Result<LoadedModel> LoadedModel::load(const std::string& dir, const LoadOptions& options, std::optional<int> device, ThreadPool& pool) {
  LoadedModel model;
  if (device) {
    ASSIGN_OR_RETURN(model.gpu_, cuda::DeviceModel::load(dir, options, *device, pool));
    return model;
  }
  ASSIGN_OR_RETURN(model.owned_, Model::load(dir, options, pool));
  model.cpu_ = model.owned_.get();
  return model;
}

const Config& LoadedModel::config() const { return gpu_ != nullptr ? gpu_->config() : cpu_->config(); }

Result<LoadedModel::Feed> LoadedModel::open(Numerics numerics, ThreadPool& pool) const {
  if (gpu_ != nullptr) {
    ASSIGN_OR_RETURN(std::unique_ptr<cuda::DeviceSequence> made, cuda::DeviceSequence::create(gpu_, {numerics, false, 256}));
    const std::shared_ptr<cuda::DeviceSequence> sequence = std::move(made);
    return Feed([sequence](std::span<const int32_t> ids) { return sequence->forward(ids, true); });
  }
  const auto state = std::make_shared<SequenceState>(cpu_->config());
  return Feed([state, model = cpu_, numerics, &pool](std::span<const int32_t> ids) -> Result<Tensor> {
    ForwardOptions options;
    options.numerics = numerics;
    options.all_logits = true;
    options.chunk = std::max<int64_t>(1, static_cast<int64_t>(ids.size()));
    ASSIGN_OR_RETURN(ForwardResult result, forward(*model, *state, ids, options, pool));
    return std::move(result.logits);
  });
}

}  // namespace espalier
