#include "model/weights.h"

#include <cmath>
#include <cstring>

#include "codec/exl3_tensor.h"
#include "format/tensor_index.h"
#include "model/coverage.h"
#include "model/folder.h"
#include "model/pack_metadata.h"
#include "tensor/float_formats.h"
#include "text/engram_map.h"
#include "text/tokenizer.h"

namespace espalier {

struct WeightLoader::Impl {
  std::string dir;
  LoadOptions options;
  Config config;
  std::shared_ptr<const TensorIndex> index;
  Coverage coverage;
  std::vector<EngramHash> hashes;
  std::vector<int32_t> token_map;

  // A small tensor of BF16, F16 or F32 as floats; NaN and infinity are refused.
  Result<std::vector<float>> floats(const std::string& name) const {
    ASSIGN_OR_RETURN(const ConstView view, index->get(name));
    std::vector<float> out(static_cast<size_t>(view.size()));
    const uint8_t* p = static_cast<const uint8_t*>(view.data);
    for (size_t i = 0; i < out.size(); ++i) {
      if (view.dtype == DType::kF32) {
        std::memcpy(&out[i], p + 4 * i, 4);
      } else {
        uint16_t bits;
        std::memcpy(&bits, p + 2 * i, 2);
        out[i] = view.dtype == DType::kBF16 ? decode_bf16(bits) : decode_f16(bits);
      }
      if (!std::isfinite(out[i])) {
        return data_loss(index->file_of(name).string() + ": tensor '" + name + "': element " + std::to_string(i) +
                         ": expected a finite number, found " + (std::isnan(out[i]) ? "NaN" : "infinity") +
                         "; the file is damaged, download it again");
      }
    }
    return out;
  }

  Result<Linear> dense(const std::string& name) const {
    ASSIGN_OR_RETURN(const ConstView view, index->get(name));
    auto linear = Linear::from_dense(name, view, 0, view.shape[0], WeightResidency::kUnpacked);
    if (!linear.ok()) return std::move(linear).error().with_context(index->file_of(name).string());
    return linear;
  }

  // Mapped rows that are only read on demand, checked once.
  Result<ConstView> mapped_rows(const std::string& name) const {
    RETURN_IF_ERROR(floats(name).status());
    return index->get(name);
  }

  Result<MixWeights> mix(const std::string& stem) const {
    MixWeights w;
    ASSIGN_OR_RETURN(w.fn, dense(stem + "_fn"));
    ASSIGN_OR_RETURN(w.base, floats(stem + "_base"));
    ASSIGN_OR_RETURN(w.scale, floats(stem + "_scale"));
    return w;
  }
};

namespace {

Result<Linear> load_exl3_matrix(const TensorIndex& index, const std::string& stem, WeightResidency residency,
                                Products products) {
  const codec::TensorLookup find = [&](const std::string& name) { return index.find(name); };
  const codec::Exl3Parts parts = codec::find_exl3_parts(find, stem);
  const std::string name = index.file_of(stem + ".trellis").string() + ": " + stem;
  const auto is_aligned = [](const std::optional<ConstView>& v) {
    return !v || reinterpret_cast<uintptr_t>(v->data) % 2 == 0;
  };
  if (!parts.su && !parts.sv && is_aligned(parts.trellis) && is_aligned(parts.suh) && is_aligned(parts.svh)) {
    ASSIGN_OR_RETURN(const codec::Exl3View view, codec::view_exl3(name, parts));
    return Linear::from_exl3(view, residency, products);
  }
  ASSIGN_OR_RETURN(codec::Exl3Tensor tensor, codec::load_exl3(name, parts));
  return Linear::from_exl3(std::move(tensor), residency, products);
}

}  // namespace

WeightLoader::WeightLoader(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
WeightLoader::~WeightLoader() = default;
WeightLoader::WeightLoader(WeightLoader&&) noexcept = default;
WeightLoader& WeightLoader::operator=(WeightLoader&&) noexcept = default;

const std::string& WeightLoader::dir() const {
  return impl_->dir;
}
const Config& WeightLoader::config() const {
  return impl_->config;
}
const TensorIndex& WeightLoader::index() const {
  return *impl_->index;
}
const Coverage& WeightLoader::coverage() const {
  return impl_->coverage;
}
const std::vector<EngramHash>& WeightLoader::engram_hashes() const {
  return impl_->hashes;
}
const std::vector<int32_t>& WeightLoader::engram_token_map() const {
  return impl_->token_map;
}
std::shared_ptr<const void> WeightLoader::files() const {
  return impl_->index;
}

Result<WeightLoader> WeightLoader::open(const std::string& dir, const LoadOptions& options) {
  auto impl = std::make_unique<Impl>();
  impl->dir = dir;
  impl->options = options;
  ASSIGN_OR_RETURN(impl->config, load_config(dir));
  ASSIGN_OR_RETURN(TensorIndex index, open_model_index(dir, options.engram_dir));
  impl->index = std::make_shared<const TensorIndex>(std::move(index));
  ASSIGN_OR_RETURN(impl->coverage, require_coverage(*impl->index, impl->config));
  ASSIGN_OR_RETURN(const PackMetadata metadata,
                   check_pack_metadata(*impl->index, impl->config, MetadataDepth::kDeclarations));
  if (!metadata.problems.empty()) {
    return data_loss(dir + ": " + metadata.problems.front() +
                     (metadata.problems.size() > 1
                          ? " (and " + std::to_string(metadata.problems.size() - 1) + " more like it)"
                          : "") +
                     "; side files and shards do not belong together, fetch the pack again or see 'espalier verify'");
  }
  const EngramConfig& engram = impl->config.engram;
  if (!engram.layers.empty()) {
    ASSIGN_OR_RETURN(impl->hashes, make_engram_hashes(impl->config));
    if (options.engram_token_map.empty()) {
      ASSIGN_OR_RETURN(const Tokenizer tokenizer, Tokenizer::open(dir + "/tokenizer.json"));
      ASSIGN_OR_RETURN(EngramMap map, build_engram_map(tokenizer));
      impl->token_map = std::move(map.class_of);
    } else {
      impl->token_map = options.engram_token_map;
    }
    int64_t n_classes = 0;
    for (int32_t c : impl->token_map) n_classes = std::max<int64_t>(n_classes, c + 1);
    if (n_classes != engram.n_classes) {
      return data_loss(dir + ": tokenizer.json: expected " + std::to_string(engram.n_classes) +
                       " Engram token classes (engram_compressed_vocab_size), found " + std::to_string(n_classes) +
                       "; do config.json and tokenizer.json belong together?");
    }
    if (engram.pad_token_id >= static_cast<int64_t>(impl->token_map.size())) {
      return data_loss(dir + ": 'engram_pad_token_id': expected an id of the tokenizer, found " +
                       std::to_string(engram.pad_token_id));
    }
  }
  return WeightLoader(std::move(impl));
}

Result<Linear> WeightLoader::load_matrix(const MatrixSpec& spec) const {
  const TensorIndex& index = *impl_->index;
  const Config& c = impl_->config;
  const WeightResidency residency = spec.expert >= 0 ? impl_->options.residency : impl_->options.dense_residency;
  const std::string stem = exl3_stem(index, spec);
  if (!stem.empty()) return load_exl3_matrix(index, stem, residency, impl_->options.products);
  const std::string name = native_name(spec);
  ASSIGN_OR_RETURN(const ConstView weight, index.get(name));
  const int64_t row_begin = spec.kind == MatrixKind::kWoA ? spec.group * spec.out : 0;
  auto linear = [&]() -> Result<Linear> {
    if (spec.native == NativeForm::kBf16 || spec.native == NativeForm::kF32) {
      return Linear::from_dense(name, weight, row_begin, spec.out, residency);
    }
    ASSIGN_OR_RETURN(const ConstView scale, index.get(name.substr(0, name.size() - 7) + ".scale"));
    if (spec.native == NativeForm::kMxfp4) return Linear::from_mxfp4(name, weight, scale, residency);
    return Linear::from_fp8(name, weight, scale, c.fp8_block_rows, c.fp8_block_cols, row_begin, spec.out, residency);
  }();
  if (!linear.ok()) return std::move(linear).error().with_context(index.file_of(name).string());
  return linear;
}

Result<BlockWeights> WeightLoader::load_block(ThreadPool& pool, int block) const {
  const Impl& m = *impl_;
  const Config& c = m.config;
  CHECK(block >= 0 && block < c.n_layers + c.drafter.n_stages) << "block " << block;
  const std::string p = block_prefix(c, block);
  BlockWeights w;
  ASSIGN_OR_RETURN(w.attn_norm, m.floats(p + "attn_norm.weight"));
  ASSIGN_OR_RETURN(w.ffn_norm, m.floats(p + "ffn_norm.weight"));
  ASSIGN_OR_RETURN(w.hc_attn, m.mix(p + "hc_attn"));
  ASSIGN_OR_RETURN(w.hc_ffn, m.mix(p + "hc_ffn"));
  ASSIGN_OR_RETURN(w.attn.sink, m.floats(p + "attn.attn_sink"));
  ASSIGN_OR_RETURN(w.attn.q_norm, m.floats(p + "attn.q_norm.weight"));
  ASSIGN_OR_RETURN(w.attn.kv_norm, m.floats(p + "attn.kv_norm.weight"));
  const bool is_layer = block < c.n_layers;
  if (is_layer && c.is_kv_source(block)) {
    w.attn.compressor.emplace();
    ASSIGN_OR_RETURN(w.attn.compressor->norm, m.floats(p + "attn.compressor.norm.weight"));
  }
  if (is_layer && c.is_index_source(block)) {
    w.attn.indexer.emplace();
    ASSIGN_OR_RETURN(w.attn.indexer->weights_proj, m.dense(p + "attn.indexer.weights_proj.weight"));
    if (c.is_kv_source(block)) {
      ASSIGN_OR_RETURN(w.attn.indexer->k_norm, m.floats(p + "attn.indexer.k_norm.weight"));
    }
  }
  ASSIGN_OR_RETURN(w.moe.gate, m.dense(p + "ffn.gate.weight"));
  ASSIGN_OR_RETURN(w.moe.bias, m.floats(p + "ffn.gate.bias"));
  if (m.index->contains(p + "ffn.gate.bias_vl")) {
    ASSIGN_OR_RETURN(w.moe.bias_vl, m.floats(p + "ffn.gate.bias_vl"));
  }
  const int slot = is_layer ? c.engram_slot(block) : -1;
  if (slot >= 0) {
    w.engram.emplace();
    w.engram->table.name = p + "engram.embed";
    ASSIGN_OR_RETURN(w.engram->table.codes, m.index->get(p + "engram.embed.weight"));
    ASSIGN_OR_RETURN(w.engram->table.scales, m.index->get(p + "engram.embed.scale"));
    ASSIGN_OR_RETURN(w.engram->q_weight, m.floats(p + "engram.q_weight"));
    ASSIGN_OR_RETURN(w.engram->k_weight, m.floats(p + "engram.k_weight"));
  }

  // Matrices are unpacked in parallel; each has its own place.
  std::vector<MatrixSpec> specs;
  for (MatrixSpec& spec : block_matrices(c, block)) {
    if (spec.kind != MatrixKind::kMainProj) specs.push_back(std::move(spec));
  }
  std::vector<Linear> linears(specs.size());
  std::vector<Status> statuses(specs.size());
  pool.parallel_for(static_cast<int64_t>(specs.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      auto linear = load_matrix(specs[static_cast<size_t>(i)]);
      if (linear.ok()) {
        linears[static_cast<size_t>(i)] = std::move(*linear);
      } else {
        statuses[static_cast<size_t>(i)] = linear.error();
      }
    }
  });
  for (const Status& status : statuses) RETURN_IF_ERROR(status);
  w.moe.experts.resize(static_cast<size_t>(is_layer ? c.n_experts : c.drafter.n_experts));
  w.attn.wo_a.resize(static_cast<size_t>(c.o_groups));
  for (size_t i = 0; i < specs.size(); ++i) {
    matrix_place(w, specs[i]) = std::move(linears[i]);
  }
  return w;
}

Linear& matrix_place(BlockWeights& w, const MatrixSpec& spec) {
  const auto expert = [&]() -> ExpertWeights& { return w.moe.experts[static_cast<size_t>(spec.expert)]; };
  switch (spec.kind) {
    case MatrixKind::kWqA:
      return w.attn.wq_a;
    case MatrixKind::kWqB:
      return w.attn.wq_b;
    case MatrixKind::kWkv:
      return w.attn.wkv;
    case MatrixKind::kWoA:
      return w.attn.wo_a[static_cast<size_t>(spec.group)];
    case MatrixKind::kWoB:
      return w.attn.wo_b;
    case MatrixKind::kCompressorWkv:
      return w.attn.compressor->wkv;
    case MatrixKind::kCompressorWgate:
      return w.attn.compressor->wgate;
    case MatrixKind::kIndexerWqB:
      return w.attn.indexer->wq_b;
    case MatrixKind::kIndexerWk:
      return w.attn.indexer->wk;
    case MatrixKind::kExpertW1:
      return expert().w1;
    case MatrixKind::kExpertW3:
      return expert().w3;
    case MatrixKind::kExpertW2:
      return expert().w2;
    case MatrixKind::kSharedW1:
      return w.moe.shared.w1;
    case MatrixKind::kSharedW3:
      return w.moe.shared.w3;
    case MatrixKind::kSharedW2:
      return w.moe.shared.w2;
    case MatrixKind::kEngramWkv:
      return w.engram->wkv;
    case MatrixKind::kHead:
    case MatrixKind::kMainProj:
      break;
  }
  CHECK(false) << spec.stem << " is not part of a block";
  return w.attn.wq_a;
}

Result<GlobalWeights> WeightLoader::load_globals(ThreadPool& pool) const {
  (void)pool;
  GlobalWeights w;
  ASSIGN_OR_RETURN(w.embed, impl_->mapped_rows("embed.weight"));
  ASSIGN_OR_RETURN(w.norm, impl_->floats("norm.weight"));
  for (const MatrixSpec& spec : all_matrices(impl_->config)) {
    if (spec.kind != MatrixKind::kHead) continue;
    ASSIGN_OR_RETURN(w.head, load_matrix(spec));
  }
  return w;
}

Result<DrafterGlobals> WeightLoader::load_drafter_globals(ThreadPool& pool) const {
  (void)pool;
  const Config& c = impl_->config;
  DrafterGlobals w;
  if (c.drafter.n_stages == 0) return w;
  const std::string last = block_prefix(c, c.n_layers + c.drafter.n_stages - 1);
  ASSIGN_OR_RETURN(w.main_proj, load_matrix(block_matrices(c, c.n_layers).front()));
  ASSIGN_OR_RETURN(w.main_norm, impl_->floats("mtp.0.main_norm.weight"));
  ASSIGN_OR_RETURN(w.norm, impl_->floats(last + "norm.weight"));
  ASSIGN_OR_RETURN(w.markov_embed, impl_->mapped_rows(last + "markov_head.embed.weight"));
  ASSIGN_OR_RETURN(w.markov_head, impl_->dense(last + "markov_head.head.weight"));
  ASSIGN_OR_RETURN(w.confidence, impl_->dense(last + "confidence_head.proj.weight"));
  return w;
}

}  // namespace espalier
