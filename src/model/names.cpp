#include "model/names.h"

namespace espalier {
namespace {

class MatrixList {
 public:
  MatrixList(std::vector<MatrixSpec>& out, std::string prefix, int block)
      : out_(out), prefix_(std::move(prefix)), block_(block) {}

  MatrixSpec& add(const std::string& name, MatrixKind kind, NativeForm native, int64_t in, int64_t out) {
    MatrixSpec m;
    m.stem = prefix_ + name;
    m.kind = kind;
    m.native = native;
    m.in = in;
    m.out = out;
    m.block = block_;
    m.is_quantizable = in % 128 == 0 && out % 128 == 0;
    out_.push_back(std::move(m));
    return out_.back();
  }

 private:
  std::vector<MatrixSpec>& out_;
  std::string prefix_;
  int block_;
};

void append_block(const Config& c, int block, std::vector<MatrixSpec>& out) {
  MatrixList list(out, block_prefix(c, block), block);
  const bool is_layer = block < c.n_layers;
  if (is_layer && c.engram_slot(block) >= 0) {
    list.add("engram.wkv", MatrixKind::kEngramWkv, NativeForm::kFp8, c.engram.d_concat(),
             (c.n_streams + 1) * c.d_model);
  }
  list.add("attn.wq_a", MatrixKind::kWqA, NativeForm::kFp8, c.d_model, c.q_lora_rank);
  list.add("attn.wq_b", MatrixKind::kWqB, NativeForm::kFp8, c.q_lora_rank, c.n_heads * c.head_dim);
  list.add("attn.wkv", MatrixKind::kWkv, NativeForm::kFp8, c.d_model, c.head_dim);
  if (is_layer && c.is_kv_source(block)) {
    list.add("attn.compressor.wkv", MatrixKind::kCompressorWkv, NativeForm::kBf16, c.d_model, c.head_dim);
    if (c.ratio(block) > 1)
      list.add("attn.compressor.wgate", MatrixKind::kCompressorWgate, NativeForm::kBf16, c.d_model, c.head_dim);
    list.add("attn.indexer.wk", MatrixKind::kIndexerWk, NativeForm::kBf16, c.head_dim, c.index_head_dim);
  }
  if (is_layer && c.is_index_source(block)) {
    list.add("attn.indexer.wq_b", MatrixKind::kIndexerWqB, NativeForm::kFp8, c.q_lora_rank,
             c.index_n_heads * c.index_head_dim);
  }
  for (int g = 0; g < static_cast<int>(c.o_groups); ++g) {
    list.add("attn.wo_a.slice." + std::to_string(g), MatrixKind::kWoA, NativeForm::kFp8,
             c.n_heads / c.o_groups * c.head_dim, c.o_lora_rank)
        .group = g;
  }
  list.add("attn.wo_b", MatrixKind::kWoB, NativeForm::kFp8, c.o_groups * c.o_lora_rank, c.d_model);
  const int64_t n_experts = is_layer ? c.n_experts : c.drafter.n_experts;
  for (int e = 0; e < static_cast<int>(n_experts); ++e) {
    const std::string stem = "ffn.experts." + std::to_string(e);
    list.add(stem + ".w1", MatrixKind::kExpertW1, NativeForm::kMxfp4, c.d_model, c.d_ff).expert = e;
    list.add(stem + ".w3", MatrixKind::kExpertW3, NativeForm::kMxfp4, c.d_model, c.d_ff).expert = e;
    list.add(stem + ".w2", MatrixKind::kExpertW2, NativeForm::kMxfp4, c.d_ff, c.d_model).expert = e;
  }
  list.add("ffn.shared_experts.w1", MatrixKind::kSharedW1, NativeForm::kFp8, c.d_model, c.d_ff);
  list.add("ffn.shared_experts.w3", MatrixKind::kSharedW3, NativeForm::kFp8, c.d_model, c.d_ff);
  list.add("ffn.shared_experts.w2", MatrixKind::kSharedW2, NativeForm::kFp8, c.d_ff, c.d_model);
}

void append_plain_block(const Config& c, int block, std::vector<TensorSpec>& out) {
  const std::string p = block_prefix(c, block);
  const bool is_layer = block < c.n_layers;
  const auto add = [&](const std::string& name, DType dtype, Shape shape, bool is_optional = false) {
    out.push_back({p + name, dtype, std::move(shape), is_optional});
  };
  const int64_t mix = c.n_mix();
  add("attn_norm.weight", DType::kBF16, {c.d_model});
  add("ffn_norm.weight", DType::kBF16, {c.d_model});
  for (const char* site : {"hc_attn", "hc_ffn"}) {
    add(std::string(site) + "_fn", DType::kF32, {mix, c.n_streams * c.d_model});
    add(std::string(site) + "_base", DType::kF32, {mix});
    add(std::string(site) + "_scale", DType::kF32, {3});
  }
  add("attn.attn_sink", DType::kF32, {c.n_heads});
  add("attn.q_norm.weight", DType::kBF16, {c.q_lora_rank});
  add("attn.kv_norm.weight", DType::kBF16, {c.head_dim});
  if (is_layer && c.is_kv_source(block)) {
    add("attn.compressor.norm.weight", DType::kBF16, {c.head_dim});
    add("attn.indexer.k_norm.weight", DType::kBF16, {c.index_head_dim});
  }
  if (is_layer && c.is_index_source(block))
    add("attn.indexer.weights_proj.weight", DType::kBF16, {c.index_n_heads, c.d_model});
  const int64_t n_experts = is_layer ? c.n_experts : c.drafter.n_experts;
  add("ffn.gate.weight", DType::kBF16, {n_experts, c.d_model});
  add("ffn.gate.bias", DType::kF32, {n_experts});
  add("ffn.gate.bias_vl", DType::kF32, {n_experts}, true);
  const int slot = is_layer ? c.engram_slot(block) : -1;
  if (slot >= 0) {
    const int64_t rows = c.engram.n_rows[static_cast<size_t>(slot)];
    add("engram.embed.weight", DType::kF8E4M3, {rows, c.engram.head_dim});
    add("engram.embed.scale", DType::kF8E8M0, {rows, c.engram.head_dim / 32});
    add("engram.q_weight", DType::kBF16, {c.n_streams, c.d_model});
    add("engram.k_weight", DType::kBF16, {c.n_streams, c.d_model});
  }
}

}  // namespace

std::string block_prefix(const Config& config, int block) {
  if (block < config.n_layers) return "layers." + std::to_string(block) + ".";
  return "mtp." + std::to_string(block - config.n_layers) + ".";
}

std::vector<MatrixSpec> block_matrices(const Config& config, int block) {
  std::vector<MatrixSpec> out;
  if (block == config.n_layers) {
    const int64_t n_taps = static_cast<int64_t>(config.drafter.target_layers.size());
    MatrixList(out, block_prefix(config, block), block)
        .add("main_proj", MatrixKind::kMainProj, NativeForm::kFp8, n_taps * config.d_model, config.d_model);
  }
  append_block(config, block, out);
  return out;
}

std::vector<MatrixSpec> all_matrices(const Config& config) {
  std::vector<MatrixSpec> out;
  for (int l = 0; l < config.n_layers; ++l) append_block(config, l, out);
  MatrixList(out, "", -1).add("head", MatrixKind::kHead, NativeForm::kBf16, config.d_model, config.vocab);
  for (int k = 0; k < config.drafter.n_stages; ++k) {
    for (MatrixSpec& m : block_matrices(config, config.n_layers + k)) out.push_back(std::move(m));
  }
  return out;
}

std::vector<MatrixSpec> quantizable_matrices(const Config& config) {
  std::vector<MatrixSpec> out;
  for (MatrixSpec& m : all_matrices(config)) {
    if (m.is_quantizable) out.push_back(std::move(m));
  }
  return out;
}

std::vector<TensorSpec> plain_tensors(const Config& config) {
  std::vector<TensorSpec> out;
  out.push_back({"embed.weight", DType::kBF16, {config.vocab, config.d_model}});
  out.push_back({"norm.weight", DType::kBF16, {config.d_model}});
  for (int b = 0; b < config.n_layers + config.drafter.n_stages; ++b) append_plain_block(config, b, out);
  const DrafterConfig& d = config.drafter;
  if (d.n_stages > 0) {
    const std::string last = block_prefix(config, config.n_layers + d.n_stages - 1);
    out.push_back({"mtp.0.main_norm.weight", DType::kBF16, {config.d_model}});
    out.push_back({last + "norm.weight", DType::kBF16, {config.d_model}});
    out.push_back({last + "markov_head.embed.weight", DType::kBF16, {config.vocab, d.markov_rank}});
    out.push_back({last + "markov_head.head.weight", DType::kBF16, {config.vocab, d.markov_rank}});
    out.push_back({last + "confidence_head.proj.weight", DType::kBF16, {1, config.d_model + d.markov_rank}});
  }
  return out;
}

std::string_view matrix_part(const MatrixSpec& spec, int n_layers) {
  if (spec.block >= n_layers || spec.kind == MatrixKind::kMainProj) return "drafter";
  switch (spec.kind) {
    case MatrixKind::kWqA:
    case MatrixKind::kWqB:
    case MatrixKind::kWkv:
    case MatrixKind::kWoA:
    case MatrixKind::kWoB:
      return "attention";
    case MatrixKind::kCompressorWkv:
    case MatrixKind::kCompressorWgate:
    case MatrixKind::kIndexerWqB:
    case MatrixKind::kIndexerWk:
      return "index";
    case MatrixKind::kExpertW1:
    case MatrixKind::kExpertW3:
    case MatrixKind::kExpertW2:
      return "routed";
    case MatrixKind::kSharedW1:
    case MatrixKind::kSharedW3:
    case MatrixKind::kSharedW2:
      return "shared";
    case MatrixKind::kEngramWkv:
      return "engram";
    case MatrixKind::kHead:
      return "head";
    case MatrixKind::kMainProj:
      return "drafter";
  }
  return "drafter";
}

std::string module_stem(const MatrixSpec& spec) {
  return spec.kind == MatrixKind::kWoA ? spec.stem.substr(0, spec.stem.find(".slice.")) : spec.stem;
}

std::string projection_name(const MatrixSpec& spec) {
  switch (spec.kind) {
    case MatrixKind::kWqA:
      return "attn.wq_a";
    case MatrixKind::kWqB:
      return "attn.wq_b";
    case MatrixKind::kWkv:
      return "attn.wkv";
    case MatrixKind::kWoA:
      return "attn.wo_a";
    case MatrixKind::kWoB:
      return "attn.wo_b";
    case MatrixKind::kCompressorWkv:
      return "attn.compressor.wkv";
    case MatrixKind::kCompressorWgate:
      return "attn.compressor.wgate";
    case MatrixKind::kIndexerWqB:
      return "attn.indexer.wq_b";
    case MatrixKind::kIndexerWk:
      return "attn.indexer.wk";
    case MatrixKind::kExpertW1:
      return "ffn.experts.w1";
    case MatrixKind::kExpertW3:
      return "ffn.experts.w3";
    case MatrixKind::kExpertW2:
      return "ffn.experts.w2";
    case MatrixKind::kSharedW1:
      return "ffn.shared_experts.w1";
    case MatrixKind::kSharedW3:
      return "ffn.shared_experts.w3";
    case MatrixKind::kSharedW2:
      return "ffn.shared_experts.w2";
    case MatrixKind::kEngramWkv:
      return "engram.wkv";
    case MatrixKind::kHead:
      return "head";
    case MatrixKind::kMainProj:
      return "main_proj";
  }
  return spec.stem;
}

bool is_ignored_name(std::string_view name) {
  for (std::string_view prefix : {"vision.", "aligner.", "image_start", "image_end", "image_newline"}) {
    if (name.substr(0, prefix.size()) == prefix) return true;
  }
  return false;
}

}  // namespace espalier
