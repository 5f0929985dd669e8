#include "model/cuda/network.h"

#include <algorithm>
#include <cstring>

#include "device/cuda_status.cuh"
#include "device/device.h"
#include "model/cuda/network_impl.h"

namespace espalier::cuda {

Result<std::shared_ptr<const DeviceModel>> DeviceModel::load(const std::string& dir, const LoadOptions& options, int device, ThreadPool& pool) {
  RETURN_IF_ERROR(device::find_device(device).status());
  const device::ScopedDevice scope(device);
  ESPALIER_CUDA_TRY("device " + std::to_string(device), scope.status());
  ASSIGN_OR_RETURN(auto weights, DeviceWeights::load(dir, options, device, pool));
  return std::make_shared<const DeviceModel>(std::move(weights));
}

const Config& DeviceModel::config() const { return weights_->config; }
int DeviceModel::device() const { return weights_->device; }
int64_t DeviceModel::size_bytes() const { return static_cast<int64_t>(weights_->size_bytes()); }

Status DeviceSequence::Impl::check_ids(std::span<const int32_t> ids) const {
  const int64_t start = position.n_tokens(), n = static_cast<int64_t>(ids.size());
  if (n == 0) return invalid_argument("tokens: expected at least one id, found none");
  if (n > config.max_positions - start) {
    return resource_exhausted("tokens: expected at most " + std::to_string(config.max_positions) +
                              " positions (max_position_embeddings), found " + std::to_string(start + n) + "; shorten the prompt");
  }
  const int64_t n_ids = config.engram.layers.empty()
                            ? config.vocab
                            : std::min<int64_t>(config.vocab, static_cast<int64_t>(weights.engram_token_map.size()));
  for (int64_t t = 0; t < n; ++t) {
    const int32_t id = ids[static_cast<size_t>(t)];
    if (id < 0 || id >= n_ids) {
      return invalid_argument("tokens: position " + std::to_string(start + t) + ": expected an id in 0.." + std::to_string(n_ids - 1) +
                              ", found " + std::to_string(id));
    }
    if (id == config.image_token_id) {
      return invalid_argument("tokens: position " + std::to_string(start + t) + ": found the image token " + std::to_string(id) +
                              "; images are not supported, use text only");
    }
  }
  return ok_status();
}

DeviceSequence::DeviceSequence(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
DeviceSequence::~DeviceSequence() = default;

Result<std::unique_ptr<DeviceSequence>> DeviceSequence::create(std::shared_ptr<const DeviceModel> model, const SequenceOptions& options) {
  const Config& c = model->config();
  const device::ScopedDevice scope(model->device());
  ESPALIER_CUDA_TRY("device " + std::to_string(model->device()), scope.status());
  if (options.chunk < 1) return invalid_argument("sequence: expected a chunk of at least 1 row, found " + std::to_string(options.chunk));
  if (options.with_drafter && c.drafter.n_stages == 0) {
    return failed_precondition("drafter: this model has none (num_nextn_predict_layers is 0)");
  }
  ASSIGN_OR_RETURN(device::Stream stream, device::Stream::create(model->device()));
  ASSIGN_OR_RETURN(SequenceCache cache, SequenceCache::create(stream, c));
  ASSIGN_OR_RETURN(PassTools tools, PassTools::create(stream, *model->weights(), std::max(options.chunk, c.drafter.block_size)));
  auto impl = std::make_unique<Impl>(std::move(model), options, std::move(stream), std::move(cache), std::move(tools));
  if (options.with_drafter) {
    ASSIGN_OR_RETURN(impl->rings, device::DeviceArray<float>::allocate(impl->stream.device(), static_cast<size_t>(c.drafter.n_stages * c.window * c.head_dim), "drafter rings"));
  }
  return std::unique_ptr<DeviceSequence>(new DeviceSequence(std::move(impl)));
}

device::Stream& DeviceSequence::stream() { return impl_->stream; }
int64_t DeviceSequence::n_tokens() const { return impl_->position.n_tokens(); }

Status DeviceSequence::truncate(int64_t n_tokens) {
  RETURN_IF_ERROR(impl_->position.truncate(n_tokens));
  if (n_tokens == 0) {
    reset();
  } else if (!impl_->engram_history.empty()) {
    impl_->engram_history.resize(static_cast<size_t>(n_tokens));
  }
  return ok_status();
}

void DeviceSequence::reset() {
  impl_->position.reset();
  impl_->engram_history.clear();
  impl_->n_taps_rows = 0;
  impl_->n_seeded = 0;
}

Result<Tensor> DeviceSequence::forward(std::span<const int32_t> ids, bool all_logits) {
  Impl& s = *impl_;
  RETURN_IF_ERROR(s.check_ids(ids));
  const device::ScopedDevice scope(s.weights.device);
  ESPALIER_CUDA_TRY("device " + std::to_string(s.weights.device), scope.status());
  const int64_t n = static_cast<int64_t>(ids.size()), width = s.taps_width();
  Tensor logits(DType::kF32, {all_logits ? n : 1, s.config.vocab});
  if (s.options.with_drafter) {
    if (s.taps.size() < static_cast<size_t>(n * width)) {
      ASSIGN_OR_RETURN(s.taps, device::DeviceArray<float>::allocate(s.stream.device(), static_cast<size_t>(n * width), "drafter inputs"));
    }
    s.n_taps_rows = n;
    s.taps_start = s.position.n_tokens();
  }
  for (int64_t done = 0; done < n; done += s.options.chunk) {
    const int64_t rows = std::min(s.options.chunk, n - done);
    const bool is_wanted = all_logits || done + rows == n;
    RETURN_IF_ERROR(s.forward_chunk(ids.subspan(static_cast<size_t>(done), static_cast<size_t>(rows)), all_logits,
                                    s.options.with_drafter ? s.taps.data() + done * width : nullptr,
                                    is_wanted ? logits.f32() + (all_logits ? done * s.config.vocab : 0) : nullptr));
  }
  return logits;
}

}  // namespace espalier::cuda
