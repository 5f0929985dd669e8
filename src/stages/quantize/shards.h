// The files of a pack: which tensor goes into which shard, and writing one shard when its block is ready.
//
// One shard per backbone layer and drafter stage, one for embedding, one for final norm and head, one per Engram table,
// one for the rest (vision tower). Number and names are known before the first is written, so a run can later go on
// where it stopped.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "codec/exl3_tensor.h"
#include "format/tensor_index.h"
#include "model/config.h"
#include "model/names.h"

namespace espalier {

class ShardPlan {
 public:
  // Splits the tensors of `index`; those that `quantized` matrices replace are left out.
  ShardPlan(const TensorIndex& index, const Config& config, const std::vector<MatrixSpec>& quantized);

  struct Shard {
    std::string name;                 // "model-00003-of-00014.safetensors"
    int block = -1;                   // backbone layer, or n_layers + stage; kHead; -1: native tensors only
    std::vector<std::string> native;  // tensors copied unchanged, sorted
  };
  static constexpr int kHead = -2;

  const std::vector<Shard>& shards() const { return shards_; }
  // The shard of a block or of the head.
  const Shard& of_block(int block) const;

 private:
  std::vector<Shard> shards_;
};

using EncodedTensors = std::vector<std::pair<std::string, codec::Exl3View>>;  // stem, matrix

// Writes one shard into `dir`, whole or not at all. Tensors of wide types come first, so that every tensor is aligned.
Status write_shard(const std::filesystem::path& dir, const ShardPlan::Shard& shard, const TensorIndex& index,
                   const EncodedTensors& encoded);

}  // namespace espalier
