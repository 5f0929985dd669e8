#include "model/cuda/device_weights.h"

#include <algorithm>
#include <cstring>

#include "codec/exl3_tensor.h"
#include "codec/cuda/windows.h"
#include "ops/rope.h"

namespace espalier::cuda {

namespace {

constexpr size_t kSlabBytes = size_t{64} << 20;
constexpr size_t kAlignment = 256;
constexpr int64_t kMaxExpertWidth = 16384;  // of codec/cuda/experts.h

size_t aligned(size_t size_bytes) { return (size_bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

Result<uint8_t*> Arena::take(size_t size_bytes, const std::string& what) {
  const size_t size = std::max(aligned(size_bytes), kAlignment);
  if (slabs_.empty() || used_ + size > slabs_.back().size_bytes()) {
    ASSIGN_OR_RETURN(device::DeviceBuffer slab, device::DeviceBuffer::allocate(device_, std::max(size, kSlabBytes), what));
    total_ += slab.size_bytes();
    slabs_.push_back(std::move(slab));
    used_ = 0;
  }
  uint8_t* piece = static_cast<uint8_t*>(slabs_.back().data()) + used_;
  used_ += size;
  return piece;
}

Result<std::shared_ptr<const codec::cuda::ExpertTable>> integer_table(device::Stream& stream, const std::vector<DeviceWeight>& gate,
                                                                      const std::vector<DeviceWeight>& up, const std::vector<DeviceWeight>& down) {
  std::vector<codec::cuda::ExpertMatrices> experts;
  for (size_t e = 0; e < gate.size(); ++e) {
    for (const DeviceWeight* w : {&gate[e], &up[e], &down[e]}) {
      if (!w->is_exl3 || w->exl3.codebook != codec::Codebook::kMul1 || w->in > kMaxExpertWidth || w->out > kMaxExpertWidth) {
        return std::shared_ptr<const codec::cuda::ExpertTable>();
      }
    }
    experts.push_back({gate[e].exl3, up[e].exl3, down[e].exl3});
  }
  ASSIGN_OR_RETURN(auto table, codec::cuda::ExpertTable::create(stream, experts));
  return std::make_shared<const codec::cuda::ExpertTable>(std::move(table));
}

// Copies one model into a DeviceWeights.
class Uploader {
 public:
  Uploader(DeviceWeights& to, device::Stream& stream, ThreadPool& pool) : to_(to), stream_(stream), pool_(pool) {}

  Status all(const WeightLoader& loader) {
    to_.config = loader.config();
    to_.engram_hashes = loader.engram_hashes();
    to_.engram_token_map = loader.engram_token_map();
    to_.files_ = loader.files();
    ASSIGN_OR_RETURN(const GlobalWeights globals, loader.load_globals(pool_));
    ASSIGN_OR_RETURN(const uint8_t* embed, bytes(globals.embed.data, static_cast<size_t>(globals.embed.size_bytes()), "embed"));
    to_.embed = reinterpret_cast<const uint16_t*>(embed);
    ASSIGN_OR_RETURN(to_.norm, floats(globals.norm));
    ASSIGN_OR_RETURN(to_.head, matrix(globals.head, "head"));
    const Config& c = to_.config;
    for (int b = 0; b < c.n_layers + c.drafter.n_stages; ++b) {
      ASSIGN_OR_RETURN(const BlockWeights weights, loader.load_block(pool_, b));
      auto uploaded = block(weights, b);
      if (!uploaded.ok()) return std::move(uploaded).error().with_context("block " + std::to_string(b) + " to the device");
      (b < c.n_layers ? to_.layers : to_.stages).push_back(std::move(uploaded).value());
    }
    if (c.drafter.n_stages > 0) RETURN_IF_ERROR(drafter(loader));
    return stream_.synchronize();
  }

 private:
  Result<uint8_t*> bytes(const void* from, size_t size_bytes, const std::string& what) {
    ASSIGN_OR_RETURN(uint8_t* to, to_.arena_.take(size_bytes, what));
    if (size_bytes > 0) RETURN_IF_ERROR(stream_.copy_to_device(to, from, size_bytes));
    return to;
  }

  Result<const float*> floats(const std::vector<float>& values) {
    ASSIGN_OR_RETURN(const uint8_t* to, bytes(values.data(), values.size() * sizeof(float), "weights"));
    return reinterpret_cast<const float*>(to);
  }

  Result<DeviceWeight> matrix(const Linear& linear, const std::string& what) {
    if (linear.empty()) return DeviceWeight();
    if (linear.exl3() != nullptr) return exl3(*linear.exl3(), what);
    ops::cuda::NativeWeight w;
    w.in = linear.in();
    w.out = linear.out();
    const StoredMatrix* stored = linear.stored();
    if (stored == nullptr) {  // made from floats [in, out]
      std::vector<float> kn(static_cast<size_t>(w.in * w.out)), rows(kn.size());
      linear.weight_kn(pool_, kn.data());
      for (int64_t o = 0; o < w.out; ++o) {
        for (int64_t i = 0; i < w.in; ++i) rows[static_cast<size_t>(o * w.in + i)] = kn[static_cast<size_t>(i * w.out + o)];
      }
      ASSIGN_OR_RETURN(w.weight, bytes(rows.data(), rows.size() * sizeof(float), what));
      return codec::cuda::weight_of(w);
    }
    size_t row_bytes = static_cast<size_t>(w.in), scale_rows = 0;
    int64_t first_scale_row = 0;
    switch (stored->form) {
      case LinearForm::kFp8:
        w.form = ops::cuda::NativeForm::kFp8;
        w.block_rows = stored->block_rows;
        w.block_cols = stored->block_cols;
        first_scale_row = stored->row_begin / w.block_rows;
        w.row_begin = stored->row_begin - first_scale_row * w.block_rows;
        scale_rows = static_cast<size_t>((w.row_begin + w.out + w.block_rows - 1) / w.block_rows);
        break;
      case LinearForm::kMxfp4:
        w.form = ops::cuda::NativeForm::kMxfp4;
        row_bytes = static_cast<size_t>(w.in / 2);
        scale_rows = static_cast<size_t>(w.out);
        break;
      default:
        w.form = stored->dtype == DType::kF32 ? ops::cuda::NativeForm::kF32
                 : stored->dtype == DType::kF16 ? ops::cuda::NativeForm::kF16 : ops::cuda::NativeForm::kBf16;
        row_bytes = static_cast<size_t>(w.in * dtype_size_bytes(stored->dtype));
        break;
    }
    ASSIGN_OR_RETURN(w.weight, bytes(stored->weight, row_bytes * static_cast<size_t>(w.out), what));
    if (scale_rows > 0) {
      w.scale_cols = stored->scale_cols;
      ASSIGN_OR_RETURN(w.scale, bytes(stored->scale + first_scale_row * w.scale_cols, scale_rows * static_cast<size_t>(w.scale_cols), what));
    }
    return codec::cuda::weight_of(w);
  }

  Result<DeviceWeight> exl3(const codec::Exl3View& tensor, const std::string& what) {
    const codec::TrellisView& t = tensor.trellis;
    to_.max_in = std::max(to_.max_in, t.k);
    to_.max_out = std::max(to_.max_out, t.n);
    const size_t trellis_bytes = static_cast<size_t>(codec::trellis_words(t.k, t.n, t.k2)) * sizeof(uint16_t);
    if (staging_.size_bytes() < trellis_bytes) {
      RETURN_IF_ERROR(stream_.synchronize());  // the old one may be in use
      ASSIGN_OR_RETURN(staging_, device::DeviceBuffer::allocate(stream_.device(), trellis_bytes, "trellis in file order"));
    }
    ASSIGN_OR_RETURN(uint8_t* blocks, to_.arena_.take(static_cast<size_t>(codec::cuda::layout_words(t.k, t.n, t.k2)) * sizeof(uint32_t), what));
    ASSIGN_OR_RETURN(const uint8_t* suh, bytes(tensor.suh, static_cast<size_t>(t.k) * sizeof(uint16_t), what));
    ASSIGN_OR_RETURN(const uint8_t* svh, bytes(tensor.svh, static_cast<size_t>(t.n) * sizeof(uint16_t), what));
    RETURN_IF_ERROR(stream_.copy_to_device(staging_.data(), t.words, trellis_bytes));
    RETURN_IF_ERROR(codec::cuda::to_device_layout(stream_, {static_cast<const uint16_t*>(staging_.data()), t.k, t.n, t.k2, t.codebook},
                                                  reinterpret_cast<uint32_t*>(blocks)));
    return codec::cuda::weight_of(codec::cuda::DeviceMatrix{reinterpret_cast<const uint32_t*>(blocks), reinterpret_cast<const uint16_t*>(suh),
                                                            reinterpret_cast<const uint16_t*>(svh), t.k, t.n, t.k2, t.codebook});
  }

  Result<DeviceMix> mix(const MixWeights& from) {
    DeviceMix to;
    ASSIGN_OR_RETURN(to.fn, matrix(from.fn, "hc_fn"));
    ASSIGN_OR_RETURN(to.base, floats(from.base));
    ASSIGN_OR_RETURN(to.scale, floats(from.scale));
    return to;
  }

  Status attention(const AttentionWeights& from, int block_index, DeviceAttention& to) {
    const Config& c = to_.config;
    ASSIGN_OR_RETURN(to.sink, floats(from.sink));
    ASSIGN_OR_RETURN(to.q_norm, floats(from.q_norm));
    ASSIGN_OR_RETURN(to.kv_norm, floats(from.kv_norm));
    const std::vector<float> frequencies =
        c.ratio(block_index) == 0
            ? ops::rope_frequencies(c.rope_dim, c.rope_theta)
            : ops::yarn_frequencies(c.rope_dim, c.compress_rope_theta,
                                    {c.yarn.factor, c.yarn.beta_fast, c.yarn.beta_slow, c.yarn.original_positions});
    ASSIGN_OR_RETURN(to.frequencies, floats(frequencies));
    ASSIGN_OR_RETURN(to.wq_a, matrix(from.wq_a, "wq_a"));
    ASSIGN_OR_RETURN(to.wq_b, matrix(from.wq_b, "wq_b"));
    ASSIGN_OR_RETURN(to.wkv, matrix(from.wkv, "wkv"));
    ASSIGN_OR_RETURN(to.wo_b, matrix(from.wo_b, "wo_b"));
    for (const Linear& slice : from.wo_a) {
      ASSIGN_OR_RETURN(DeviceWeight w, matrix(slice, "wo_a"));
      to.wo_a.push_back(w);
    }
    if (from.compressor) {
      to.compressor.emplace();
      ASSIGN_OR_RETURN(to.compressor->wkv, matrix(from.compressor->wkv, "compressor.wkv"));
      ASSIGN_OR_RETURN(to.compressor->wgate, matrix(from.compressor->wgate, "compressor.wgate"));
      ASSIGN_OR_RETURN(to.compressor->norm, floats(from.compressor->norm));
    }
    if (from.indexer) {
      to.indexer.emplace();
      ASSIGN_OR_RETURN(to.indexer->wq_b, matrix(from.indexer->wq_b, "indexer.wq_b"));
      ASSIGN_OR_RETURN(to.indexer->weights_proj, matrix(from.indexer->weights_proj, "indexer.weights_proj"));
      ASSIGN_OR_RETURN(to.indexer->wk, matrix(from.indexer->wk, "indexer.wk"));
      ASSIGN_OR_RETURN(to.indexer->k_norm, floats(from.indexer->k_norm));
    }
    return ok_status();
  }

  Result<const DeviceWeight*> table(const std::vector<ExpertWeights>& experts, Linear ExpertWeights::*member, const char* what,
                                    std::vector<DeviceWeight>& weights) {
    for (const ExpertWeights& expert : experts) {
      ASSIGN_OR_RETURN(DeviceWeight w, matrix(expert.*member, what));
      weights.push_back(w);
    }
    ASSIGN_OR_RETURN(const uint8_t* to, bytes(weights.data(), weights.size() * sizeof(DeviceWeight), what));
    return reinterpret_cast<const DeviceWeight*>(to);
  }

  Status moe(const MoeWeights& from, DeviceMoe& to) {
    ASSIGN_OR_RETURN(to.gate, matrix(from.gate, "gate"));
    ASSIGN_OR_RETURN(to.bias, floats(from.bias));
    to.n_experts = static_cast<int64_t>(from.experts.size());
    std::vector<DeviceWeight> w1, w3, w2;
    ASSIGN_OR_RETURN(to.w1, table(from.experts, &ExpertWeights::w1, "experts w1", w1));
    ASSIGN_OR_RETURN(to.w3, table(from.experts, &ExpertWeights::w3, "experts w3", w3));
    ASSIGN_OR_RETURN(to.w2, table(from.experts, &ExpertWeights::w2, "experts w2", w2));
    if (to_.products != Products::kExact) {
      ASSIGN_OR_RETURN(to.table, integer_table(stream_, w1, w3, w2));
      to_.has_tables = to_.has_tables || to.table != nullptr;
    }
    ASSIGN_OR_RETURN(to.shared_w1, matrix(from.shared.w1, "shared w1"));
    ASSIGN_OR_RETURN(to.shared_w3, matrix(from.shared.w3, "shared w3"));
    ASSIGN_OR_RETURN(to.shared_w2, matrix(from.shared.w2, "shared w2"));
    return ok_status();
  }

  Result<DeviceBlock> block(const BlockWeights& from, int index) {
    DeviceBlock to;
    ASSIGN_OR_RETURN(to.attn_norm, floats(from.attn_norm));
    ASSIGN_OR_RETURN(to.ffn_norm, floats(from.ffn_norm));
    ASSIGN_OR_RETURN(to.hc_attn, mix(from.hc_attn));
    ASSIGN_OR_RETURN(to.hc_ffn, mix(from.hc_ffn));
    RETURN_IF_ERROR(attention(from.attn, index, to.attn));
    RETURN_IF_ERROR(moe(from.moe, to.moe));
    if (from.engram) {
      to.engram.emplace();
      to.engram->table = from.engram->table;
      ASSIGN_OR_RETURN(to.engram->wkv, matrix(from.engram->wkv, "engram.wkv"));
      ASSIGN_OR_RETURN(to.engram->q_weight, floats(from.engram->q_weight));
      ASSIGN_OR_RETURN(to.engram->k_weight, floats(from.engram->k_weight));
    }
    RETURN_IF_ERROR(stream_.synchronize());
    return Result<DeviceBlock>(std::move(to));
  }

  Status drafter(const WeightLoader& loader) {
    ASSIGN_OR_RETURN(const DrafterGlobals from, loader.load_drafter_globals(pool_));
    DeviceDrafter& to = to_.drafter;
    ASSIGN_OR_RETURN(to.main_proj, matrix(from.main_proj, "main_proj"));
    ASSIGN_OR_RETURN(to.main_norm, floats(from.main_norm));
    ASSIGN_OR_RETURN(to.norm, floats(from.norm));
    to.markov_embed = from.markov_embed;
    ASSIGN_OR_RETURN(to.markov_head, matrix(from.markov_head, "markov_head"));
    ASSIGN_OR_RETURN(to.confidence, matrix(from.confidence, "confidence_head"));
    return ok_status();
  }

  DeviceWeights& to_;
  device::Stream& stream_;
  ThreadPool& pool_;
  device::DeviceBuffer staging_;
};

Result<std::shared_ptr<const DeviceWeights>> DeviceWeights::load(const std::string& dir, const LoadOptions& options, int device,
                                                                 ThreadPool& pool) {
  if (options.products == Products::kInt8) {
    return unimplemented("products 'int8' on a GPU: use int8r, which is as fast there, or exact");
  }
  ASSIGN_OR_RETURN(device::Stream stream, device::Stream::create(device));
  LoadOptions stored = options;
  stored.residency = WeightResidency::kStored;
  stored.dense_residency = WeightResidency::kStored;
  stored.products = Products::kExact;
  ASSIGN_OR_RETURN(const WeightLoader loader, WeightLoader::open(dir, stored));
  std::shared_ptr<DeviceWeights> weights(new DeviceWeights(device));
  weights->products = options.products;
  stream.begin_step("upload of " + dir);
  RETURN_IF_ERROR(Uploader(*weights, stream, pool).all(loader));
  return std::shared_ptr<const DeviceWeights>(std::move(weights));
}

}  // namespace espalier::cuda
