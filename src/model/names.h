// Tensor names, shapes and forms of a checkpoint or pack for a given config: what must be there, what may be, and which
// matrices a quantizer replaces. The names are the vendor's; EXL3 packs store `<stem>.trellis/.suh/.svh(/.mul1|.mcg)`
// instead of `<stem>.weight(/.scale)`. Source: model.md section 2, packs.md 1.4, docs/formats/checkpoint.md.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "model/config.h"
#include "tensor/view.h"

namespace espalier {

// How a matrix is stored in the official checkpoint.
enum class NativeForm { kFp8, kMxfp4, kBf16, kF32 };

enum class MatrixKind {
  kWqA,
  kWqB,
  kWkv,
  kWoA,
  kWoB,  // attention; kWoA is one group's slice
  kCompressorWkv,
  kCompressorWgate,
  kIndexerWqB,
  kIndexerWk,
  kExpertW1,
  kExpertW3,
  kExpertW2,  // routed experts
  kSharedW1,
  kSharedW3,
  kSharedW2,
  kEngramWkv,
  kHead,
  kMainProj,
};

// One matrix that is multiplied with activations and that a quantizer may replace.
struct MatrixSpec {
  std::string stem;  // "layers.3.attn.wq_a", "layers.3.attn.wo_a.slice.1", "mtp.0.ffn.experts.2.w1", "head"
  MatrixKind kind;
  NativeForm native;
  int64_t in = 0;
  int64_t out = 0;
  int block = -1;               // backbone layer, or n_layers + stage for the drafter; -1: root
  int expert = -1;              // routed expert id
  int group = -1;               // wo_a slice; native tensor is rows [group*out, (group+1)*out) of `<block>.attn.wo_a`
  bool is_quantizable = false;  // both dimensions are multiples of 128
};

// A tensor that is not such a matrix: norms, routers, mHC, sinks, embeddings, tables.
struct TensorSpec {
  std::string name;
  DType dtype;
  Shape shape;
  bool is_optional = false;  // router bias of image tokens (absent in some packs)
};

// "layers.3." for a backbone layer, "mtp.0." for block n_layers + 0.
std::string block_prefix(const Config& config, int block);

// Every matrix of the network, in the order of the forward pass (backbone, head, drafter).
std::vector<MatrixSpec> all_matrices(const Config& config);
// The matrices of one block (backbone layer or n_layers + stage).
std::vector<MatrixSpec> block_matrices(const Config& config, int block);
// all_matrices with is_quantizable only.
std::vector<MatrixSpec> quantizable_matrices(const Config& config);
// Everything else.
std::vector<TensorSpec> plain_tensors(const Config& config);

// The part of the network that a matrix belongs to: "routed", "shared", "attention", "index", "engram", "head", "drafter".
std::string_view matrix_part(const MatrixSpec& spec, int n_layers);
// Stem without the group of a wo_a slice: the module that `dense` maps of packs name, and the native tensor's stem.
std::string module_stem(const MatrixSpec& spec);
// Name within its block, without expert and group: "attn.wq_a", "attn.wo_a", "ffn.experts.w1", "main_proj"; "head".
std::string projection_name(const MatrixSpec& spec);

// Names that a loader accepts without using them: vision tower, aligner, image markers.
bool is_ignored_name(std::string_view name);

}  // namespace espalier
