// All weights of the network in device memory, block by block; the shapes are those of model/weights.h.
//
// Native matrices keep their stored form, EXL3 matrices are rearranged into the layout of codec/cuda/windows.h. Engram tables stay on
// the host, mapped. Memory comes in a few large pieces that live as long as the DeviceWeights. Internal to model/cuda.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "codec/cuda/experts.h"
#include "codec/cuda/rows_product.h"
#include "device/buffer.h"
#include "device/stream.h"
#include "model/weights.h"

namespace espalier::cuda {

using codec::cuda::DeviceWeight;

// Device memory handed out piece by piece and freed as a whole. Pieces are 256-byte aligned.
class Arena {
 public:
  explicit Arena(int device) : device_(device) {}
  Result<uint8_t*> take(size_t size_bytes, const std::string& what);
  size_t size_bytes() const { return total_; }

 private:
  int device_;
  std::vector<device::DeviceBuffer> slabs_;
  size_t used_ = 0;  // of the last slab
  size_t total_ = 0;
};

struct DeviceMix {
  DeviceWeight fn;
  const float* base = nullptr;
  const float* scale = nullptr;
};

struct DeviceCompressor {
  DeviceWeight wkv;
  DeviceWeight wgate;  // out is 0 at ratio 1
  const float* norm = nullptr;
};

struct DeviceIndexer {
  DeviceWeight wq_b;
  DeviceWeight weights_proj;
  DeviceWeight wk;  // kv sources only
  const float* k_norm = nullptr;
};

struct DeviceAttention {
  const float* sink = nullptr;
  const float* q_norm = nullptr;
  const float* kv_norm = nullptr;
  const float* frequencies = nullptr;  // [rope_dim/2] of this block
  DeviceWeight wq_a, wq_b, wkv, wo_b;
  std::vector<DeviceWeight> wo_a;
  std::optional<DeviceCompressor> compressor;
  std::optional<DeviceIndexer> indexer;
};

struct DeviceMoe {
  DeviceWeight gate;
  const float* bias = nullptr;
  int64_t n_experts = 0;
  const DeviceWeight* w1 = nullptr;  // device memory, [n_experts]
  const DeviceWeight* w3 = nullptr;
  const DeviceWeight* w2 = nullptr;
  std::shared_ptr<const codec::cuda::ExpertTable> table;  // products in integers only, when all experts are mul1 matrices; else null
  DeviceWeight shared_w1, shared_w3, shared_w2;
};

struct DeviceEngram {
  EngramTable table;  // host
  DeviceWeight wkv;
  const float* q_weight = nullptr;
  const float* k_weight = nullptr;
};

struct DeviceBlock {
  const float* attn_norm = nullptr;
  const float* ffn_norm = nullptr;
  DeviceMix hc_attn, hc_ffn;
  DeviceAttention attn;
  DeviceMoe moe;
  std::optional<DeviceEngram> engram;
};

struct DeviceDrafter {
  DeviceWeight main_proj;
  const float* main_norm = nullptr;
  const float* norm = nullptr;
  ConstView markov_embed;  // host, mapped
  DeviceWeight markov_head;
  DeviceWeight confidence;
};

class DeviceWeights {
 public:
  // Reads `dir` block by block and uploads it; at most one block is on the host at a time (as mapped files).
  // Errors: as WeightLoader, and what the device says (resource_exhausted when it is too small).
  static Result<std::shared_ptr<const DeviceWeights>> load(const std::string& dir, const LoadOptions& options, int device, ThreadPool& pool);

  // Without any content, for benches that fill it themselves with memory from arena().
  static std::shared_ptr<DeviceWeights> make_empty(int device) { return std::shared_ptr<DeviceWeights>(new DeviceWeights(device)); }
  Arena& arena() { return arena_; }

  Config config;
  int device = 0;
  std::vector<EngramHash> engram_hashes;
  std::vector<int32_t> engram_token_map;
  const uint16_t* embed = nullptr;  // [V, D]:bf16
  const float* norm = nullptr;
  DeviceWeight head;
  std::vector<DeviceBlock> layers;
  std::vector<DeviceBlock> stages;
  DeviceDrafter drafter;
  int64_t max_in = 0, max_out = 0;  // of all EXL3 matrices
  Products products = Products::kExact;
  bool has_tables = false;  // some DeviceMoe has one
  size_t size_bytes() const { return arena_.size_bytes(); }

 private:
  friend class Uploader;
  explicit DeviceWeights(int device_index) : device(device_index), arena_(device_index) {}
  Arena arena_;
  std::shared_ptr<const void> files_;  // keeps mapped tables alive
};

// The experts of a layer for codec/cuda/experts.h, or null when they are not all mul1 matrices that it can multiply.
Result<std::shared_ptr<const codec::cuda::ExpertTable>> integer_table(device::Stream& stream, const std::vector<DeviceWeight>& gate,
                                                                      const std::vector<DeviceWeight>& up, const std::vector<DeviceWeight>& down);

}  // namespace espalier::cuda
