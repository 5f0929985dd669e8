// What a DeviceSequence is made of. Internal to model/cuda.
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "device/graph.h"
#include "device/pinned.h"
#include "model/cuda/network.h"
#include "model/cuda/run.h"
#include "model/state.h"

namespace espalier::cuda {

// Everything that decides which launches a pass through the layers consists of, apart from memory that stays where it is.
struct PassKey {
  int64_t n = 0;          // rows
  int64_t phase = 0;      // position modulo every compress ratio
  int64_t n_logits = 0;   // last rows whose logits are wanted
  const float* taps = nullptr;
  auto operator<=>(const PassKey&) const = default;
};

struct DeviceSequence::Impl {
  Impl(std::shared_ptr<const DeviceModel> of, const SequenceOptions& with, device::Stream on, SequenceCache caches, PassTools with_tools)
      : model(std::move(of)),
        weights(*model->weights()),
        config(weights.config),
        options(with),
        stream(std::move(on)),
        cache(std::move(caches)),
        workspace(weights.device),
        tools(std::move(with_tools)) {}

  Run run() { return Run(weights, options.numerics, stream, workspace, tools); }
  int64_t taps_width() const { return static_cast<int64_t>(config.drafter.target_layers.size()) * config.d_model; }

  Status check_ids(std::span<const int32_t> ids) const;
  // Queues what a pass over `ids` at position `start` reads: the position, the ids, and with_engram the Engram rows (the history holds
  // the ids already). One copy from pinned memory; `inputs` does not move unless it grows, which ends the recorded passes.
  Status send_inputs(std::span<const int32_t> ids, int64_t start, bool with_engram);
  const int64_t* device_start() const { return static_cast<const int64_t*>(inputs.data()); }
  const int32_t* device_ids() const { return static_cast<const int32_t*>(inputs.data()) + 4; }
  const float* device_engram(int64_t n, size_t slot) const;
  // Streams of the ids that were sent; device memory of the workspace.
  Result<DeviceRows> begin_rows(int64_t start, int64_t n);

  Status forward_chunk(std::span<const int32_t> ids, bool all_logits, float* taps, float* logits);
  // Queues one pass; logits [n_logits, V] of the workspace, or null.
  Result<float*> queue_pass(const PassKey& key, int64_t start);
  Status run_engram(Run& run, const DeviceEngram& w, const float* e, DeviceRows& rows);

  std::shared_ptr<const DeviceModel> model;
  const DeviceWeights& weights;
  const Config& config;
  const SequenceOptions options;
  device::Stream stream;
  SequenceCache cache;
  Workspace workspace;
  PassTools tools;
  SequencePosition position;
  std::vector<int32_t> engram_history;
  device::PinnedBuffer pinned_inputs, pinned_logits;
  device::DeviceBuffer inputs;  // start:i64, unused:i64, ids:i32 padded to 16 bytes, Engram rows
  // Recorded passes. A pass runs as launches once, which makes its memory; then it is recorded.
  struct Recorded {
    device::Graph graph;
    float* logits;
  };
  std::map<PassKey, std::optional<Recorded>> passes;
  // Drafter.
  device::DeviceArray<float> taps;   // [n_taps_rows, taps_width] of the last call
  int64_t n_taps_rows = 0;
  int64_t taps_start = 0;
  device::DeviceArray<float> rings;  // [n_stages, window, head_dim]
  int64_t n_seeded = 0;
};

}  // namespace espalier::cuda
