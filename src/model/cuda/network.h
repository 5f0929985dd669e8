// The network on a GPU: weights uploaded once, and sequences that run the forward pass and the drafter there. Needs no CUDA header, so any
// .cpp file may use it; in a build without CUDA loading answers `unavailable`.
//
// In products `exact` logits have the bits of the CPU's forward pass (model/forward.h): the same orders of sums and elementary functions. In
// `int8r` EXL3 matrices of the mul1 codebook are multiplied in integers and all other sums have fixed orders of their own, many times
// faster; logits then differ from the CPU's by roundings. In both rows do not depend on how a prompt is cut into calls or chunks. Engram rows are gathered on the host and go up through pinned memory
// before a chunk starts; within a chunk nothing waits for the host.
// Source: model.md sections 3 to 8; docs/decisions/cuda-network.md.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "base/status.h"
#include "base/thread_pool.h"
#include "device/stream.h"
#include "model/config.h"
#include "model/drafter.h"
#include "model/numerics.h"
#include "model/weights.h"
#include "tensor/view.h"

namespace espalier::cuda {

class DeviceWeights;

// A loaded model. Threads: immutable.
class DeviceModel {
 public:
  // options.residency is not used: matrices keep their stored form.
  // Errors: unimplemented for products int8; unavailable without CUDA or a device; as WeightLoader; resource_exhausted when the device is too small.
  static Result<std::shared_ptr<const DeviceModel>> load(const std::string& dir, const LoadOptions& options, int device, ThreadPool& pool);

  // Of weights that are on the device already.
  explicit DeviceModel(std::shared_ptr<const DeviceWeights> weights) : weights_(std::move(weights)) {}

  const Config& config() const;
  int device() const;
  int64_t size_bytes() const;  // of the weights in device memory
  const std::shared_ptr<const DeviceWeights>& weights() const { return weights_; }

 private:
  std::shared_ptr<const DeviceWeights> weights_;
};

struct SequenceOptions {
  Numerics numerics = Numerics::kKvq;
  bool with_drafter = false;  // keep what the drafter needs; the model must have one
  int64_t chunk = 256;        // rows per pass through the layers; does not change the result
  bool uses_graphs = true;    // passes of a few rows and of whole chunks are recorded and replayed; does not change the result
};

// One sequence and its caches. Threads: one at a time. After an error (other than invalid_argument) it must be reset.
class DeviceSequence {
 public:
  static Result<std::unique_ptr<DeviceSequence>> create(std::shared_ptr<const DeviceModel> model, const SequenceOptions& options);
  ~DeviceSequence();
  DeviceSequence(const DeviceSequence&) = delete;
  DeviceSequence& operator=(const DeviceSequence&) = delete;

  int64_t n_tokens() const;
  // As SequenceState.
  Status truncate(int64_t n_tokens);
  void reset();

  // Feeds ids at positions n_tokens() .. ; logits [rows or 1, V]:f32 of every row or of the last one. Errors: as forward().
  Result<Tensor> forward(std::span<const int32_t> ids, bool all_logits);

  // Where its work is queued: for timing.
  device::Stream& stream();

  // --- with_drafter only ---
  // Gives the drafter the first n_rows rows of the last forward call: they are accepted.
  Status seed_drafter(int64_t n_rows);
  // As espalier::draft: guesses after `token`, which follows the seeded positions.
  Result<DraftResult> draft(int32_t token);

 private:
  struct Impl;
  explicit DeviceSequence(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace espalier::cuda
