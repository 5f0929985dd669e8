#include "runtime/network.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "model/cuda/network.h"
#include "model/drafter.h"
#include "model/forward.h"

namespace espalier {
namespace {

class NetworkSession : public Session {
 public:
  NetworkSession(std::shared_ptr<const Model> model, Numerics numerics, ThreadPool& pool, bool with_drafter)
      : model_(std::move(model)), numerics_(numerics), pool_(pool), state_(model_->config()) {
    if (with_drafter) drafter_.emplace(model_->config());
  }

  int64_t n_tokens() const override { return state_.n_tokens(); }

  Result<Tensor> feed(std::span<const int32_t> ids, bool all_logits) override {
    RETURN_IF_ERROR(seed_accepted());
    const int64_t start = state_.n_tokens();
    ForwardOptions options;
    options.numerics = numerics_;
    options.all_logits = all_logits;
    ASSIGN_OR_RETURN(ForwardResult result, forward(*model_, state_, ids, options, pool_));
    if (drafter_) {
      taps_ = std::move(result.taps);
      taps_start_ = start;
    }
    return std::move(result.logits);
  }

  Status truncate(int64_t n_tokens) override {
    if (n_tokens == state_.n_tokens()) return ok_status();
    return state_.truncate(n_tokens);
  }

  Result<std::vector<int32_t>> draft(int32_t anchor) override {
    if (!drafter_) return std::vector<int32_t>();
    RETURN_IF_ERROR(seed_accepted());
    ASSIGN_OR_RETURN(DraftResult result, espalier::draft(*model_, *drafter_, anchor, numerics_, pool_));
    // Rows beyond what the caches can take back are not worth guessing.
    const auto limit = static_cast<size_t>(SequenceState::kRewindRows - 1);
    if (result.ids.size() > limit) result.ids.resize(limit);
    return std::move(result.ids);
  }

 private:
  // Gives the drafter the taps of the rows of the last feed that were kept.
  Status seed_accepted() {
    if (!drafter_ || taps_.empty()) return ok_status();
    const int64_t n_kept = std::min(state_.n_tokens() - taps_start_, taps_.dim(0));
    Tensor taps = std::exchange(taps_, Tensor());
    if (n_kept <= 0) return ok_status();
    if (n_kept == taps.dim(0)) return seed_drafter(*model_, *drafter_, taps, n_kept, numerics_, pool_);
    Tensor kept(DType::kF32, {n_kept, taps.dim(1)});
    std::memcpy(kept.data(), taps.data(), static_cast<size_t>(kept.size_bytes()));
    return seed_drafter(*model_, *drafter_, kept, n_kept, numerics_, pool_);
  }

  std::shared_ptr<const Model> model_;
  const Numerics numerics_;
  ThreadPool& pool_;
  SequenceState state_;
  std::optional<DrafterState> drafter_;
  Tensor taps_;  // [rows of the last feed, n_taps*D], not yet given to the drafter
  int64_t taps_start_ = 0;
};

class Network : public LanguageModel {
 public:
  Network(std::shared_ptr<const Model> model, Numerics numerics, ThreadPool& pool)
      : model_(std::move(model)), numerics_(numerics), pool_(pool) {}

  int64_t vocab() const override { return model_->config().vocab; }
  int64_t max_context() const override { return model_->config().max_positions; }
  std::vector<int32_t> placeholder_ids() const override {
    const int32_t image = model_->config().image_token_id;
    return image >= 0 ? std::vector<int32_t>{image} : std::vector<int32_t>();
  }
  bool can_draft() const override { return !model_->stages.empty(); }
  Result<std::unique_ptr<Session>> open_session(bool with_drafter) override {
    return std::unique_ptr<Session>(
        std::make_unique<NetworkSession>(model_, numerics_, pool_, with_drafter && can_draft()));
  }

 private:
  std::shared_ptr<const Model> model_;
  const Numerics numerics_;
  ThreadPool& pool_;
};

// The same on a GPU.
class DeviceSession : public Session {
 public:
  DeviceSession(std::unique_ptr<cuda::DeviceSequence> sequence, bool with_drafter)
      : sequence_(std::move(sequence)), with_drafter_(with_drafter) {}

  int64_t n_tokens() const override { return sequence_->n_tokens(); }

  Result<Tensor> feed(std::span<const int32_t> ids, bool all_logits) override {
    RETURN_IF_ERROR(seed_accepted());
    const int64_t start = sequence_->n_tokens();
    ASSIGN_OR_RETURN(Tensor logits, sequence_->forward(ids, all_logits));
    fed_start_ = start;
    n_fed_ = static_cast<int64_t>(ids.size());
    return logits;
  }

  Status truncate(int64_t n_tokens) override {
    return n_tokens == sequence_->n_tokens() ? ok_status() : sequence_->truncate(n_tokens);
  }

  Result<std::vector<int32_t>> draft(int32_t anchor) override {
    if (!with_drafter_) return std::vector<int32_t>();
    RETURN_IF_ERROR(seed_accepted());
    ASSIGN_OR_RETURN(DraftResult result, sequence_->draft(anchor));
    const auto limit = static_cast<size_t>(SequenceState::kRewindRows - 1);
    if (result.ids.size() > limit) result.ids.resize(limit);
    return std::move(result.ids);
  }

 private:
  Status seed_accepted() {
    const int64_t n_kept = std::min(sequence_->n_tokens() - fed_start_, n_fed_);
    n_fed_ = 0;
    return with_drafter_ && n_kept > 0 ? sequence_->seed_drafter(n_kept) : ok_status();
  }

  const std::unique_ptr<cuda::DeviceSequence> sequence_;
  const bool with_drafter_;
  int64_t fed_start_ = 0;  // of the last feed
  int64_t n_fed_ = 0;      // its rows that the drafter has not been told about
};

class DeviceNetwork : public LanguageModel {
 public:
  DeviceNetwork(std::shared_ptr<const cuda::DeviceModel> model, Numerics numerics) : model_(std::move(model)), numerics_(numerics) {}

  int64_t vocab() const override { return model_->config().vocab; }
  int64_t max_context() const override { return model_->config().max_positions; }
  std::vector<int32_t> placeholder_ids() const override {
    const int32_t image = model_->config().image_token_id;
    return image >= 0 ? std::vector<int32_t>{image} : std::vector<int32_t>();
  }
  bool can_draft() const override { return model_->config().drafter.n_stages > 0; }
  Result<std::unique_ptr<Session>> open_session(bool with_drafter) override {
    const bool drafts = with_drafter && can_draft();
    ASSIGN_OR_RETURN(auto sequence, cuda::DeviceSequence::create(model_, {numerics_, drafts, 256}));
    return std::unique_ptr<Session>(std::make_unique<DeviceSession>(std::move(sequence), drafts));
  }

 private:
  const std::shared_ptr<const cuda::DeviceModel> model_;
  const Numerics numerics_;
};

}  // namespace

Result<std::shared_ptr<LanguageModel>> load_network(const std::string& dir, const NetworkOptions& options, ThreadPool& pool) {
  LoadOptions load;
  load.engram_dir = options.engram_dir;
  load.products = options.products;
  if (options.device) {
    ASSIGN_OR_RETURN(auto device_model, cuda::DeviceModel::load(dir, load, *options.device, pool));
    return std::shared_ptr<LanguageModel>(std::make_shared<DeviceNetwork>(std::move(device_model), options.numerics));
  }
  ASSIGN_OR_RETURN(auto model, Model::load(dir, load, pool));
  return std::shared_ptr<LanguageModel>(std::make_shared<Network>(std::move(model), options.numerics, pool));
}

Result<std::unique_ptr<Engine>> load_engine(const std::string& dir, const NetworkOptions& network, const EngineOptions& options,
                                            ThreadPool& pool) {
  ASSIGN_OR_RETURN(auto tokenizer, Tokenizer::open(dir + "/tokenizer.json"));
  ASSIGN_OR_RETURN(auto model, load_network(dir, network, pool));
  return Engine::create(std::move(model), std::make_shared<const Tokenizer>(std::move(tokenizer)), options);
}

}  // namespace espalier
