// What serving a folder takes per rank: weights as split over the ranks, caches for a context and a number of slots, and the
// fixed terms of an engine. An estimate from headers; nothing is allocated.
//
// Split over R ranks, in whole blocks of 128 channels: routed and shared experts by their hidden channels, wq_b and the head by
// outputs, wo_a by groups, wo_b by inputs, the embedding by rows; the drafter's alike. Everything else is on every rank, the
// vision tower on the first. Engram tables stay on disk. The first rank holds the most. Source: packs.md 2.2 to 2.4.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "base/status.h"
#include "format/tensor_index.h"
#include "model/config.h"

namespace espalier {

struct MemoryRequest {
  int64_t ranks = 1;
  int64_t context = 0;  // tokens per slot; 0: the model's limit
  int64_t slots = 1;
  uint64_t available_bytes = uint64_t{112} << 30;  // per rank, before loading
};

struct MemoryPlan {
  MemoryRequest request;                    // with the context filled in
  std::map<std::string, uint64_t> weights;  // first rank, by part; "engram tables" are not in memory
  uint64_t weight_bytes = 0;
  double kv_bytes_per_token = 0;  // FP8 rows and FP8 index keys, on every rank
  uint64_t kv_bytes = 0;          // slots x context
  uint64_t slot_bytes = 0;        // window rings and drafter taps, all slots
  uint64_t engine_bytes = 0;      // workspace, runtime, sessions, staging
  uint64_t reserve_bytes = 0;     // what a node keeps free
  uint64_t total_bytes = 0;
  bool fits = false;
  int64_t pool_tokens = 0;  // tokens that the memory left over beside weights and fixed terms would hold
};

// Errors: invalid_argument for ranks, context or slots that make no sense for the config.
Result<MemoryPlan> plan_memory(const TensorIndex& index, const Config& config, const MemoryRequest& request);

}  // namespace espalier
