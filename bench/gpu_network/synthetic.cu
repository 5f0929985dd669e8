#include "bench/gpu_network/synthetic.h"

#include <cuda_fp16.h>

#include <cmath>

#include "base/rng.h"
#include "codec/cuda/windows.h"
#include "device/device.h"
#include "model/cuda/device_weights.h"
#include "ops/rope.h"

namespace espalier::bench {
namespace {

using codec::cuda::DeviceWeight;
using ops::cuda::NativeForm;

__device__ uint64_t mixed(uint64_t z) {  // splitmix64
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

enum class Fill { kBits, kF32, kBf16, kF16Signs, kFp8, kScales };

// n units of 8 bytes.
__global__ void fill_kernel(uint64_t* to, size_t n, uint64_t seed, Fill fill, float size, int scale_code) {
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += size_t{gridDim.x} * blockDim.x) {
    const uint64_t bits = mixed(seed + i * 0x9E3779B97F4A7C15ull);
    uint64_t out = bits;
    if (fill == Fill::kF32 || fill == Fill::kBf16) {
      out = 0;
      for (int j = 0; j < (fill == Fill::kF32 ? 2 : 4); ++j) {
        const uint32_t part = static_cast<uint32_t>(bits >> (16 * j)) & 0xFFFFu;
        const float v = size * 1.7320508f * (static_cast<float>(part) - 32767.5f) / 32768.0f;
        if (fill == Fill::kF32) out |= static_cast<uint64_t>(__float_as_uint(v)) << (32 * j);
        if (fill == Fill::kBf16) out |= static_cast<uint64_t>(__float_as_uint(v) >> 16) << (16 * j);
      }
    }
    if (fill == Fill::kF16Signs) {  // +-size, and a little
      const uint64_t magnitude = __half_as_ushort(__float2half(size));
      out = magnitude * 0x0001000100010001ull | (bits & 0x8000800080008000ull) | (bits & 0x001F001F001F001Full);
    }
    if (fill == Fill::kFp8) out = bits & 0xBFBFBFBFBFBFBFBFull;  // no NaN
    if (fill == Fill::kScales) out = static_cast<uint64_t>(scale_code) * 0x0101010101010101ull;
    to[i] = out;
  }
}

class Maker {
 public:
  Maker(const SyntheticOptions& options, device::Stream stream)
      : options_(options), stream_(std::move(stream)), weights_(cuda::DeviceWeights::make_empty(0)) {}

  Result<SyntheticNetwork> all() {
    set_config();
    weights_->products = options_.products;
    Config& c = weights_->config;
    ASSIGN_OR_RETURN(weights_->engram_hashes, make_engram_hashes(c));
    for (int64_t i = 0; i < c.vocab; ++i) weights_->engram_token_map.push_back(static_cast<int32_t>(i % c.engram.n_classes));
    ASSIGN_OR_RETURN(const void* embed, filled(static_cast<size_t>(c.vocab * c.d_model) * 2, Fill::kBf16, 0.12f));
    weights_->embed = static_cast<const uint16_t*>(embed);
    ASSIGN_OR_RETURN(weights_->norm, ones(c.d_model, 1));
    bytes_ = 0;
    ASSIGN_OR_RETURN(weights_->head, dense(c.d_model, c.vocab, NativeForm::kBf16));
    out_.head_bytes = bytes_;
    for (int l = 0; l < c.n_layers; ++l) {
      bytes_ = 0;
      cuda::DeviceBlock block;
      RETURN_IF_ERROR(make_block(l, block));
      weights_->layers.push_back(std::move(block));
    }
    RETURN_IF_ERROR(stream_.synchronize());
    out_.model = std::make_shared<const cuda::DeviceModel>(weights_);
    return Result<SyntheticNetwork>(std::move(out_));
  }

 private:
  void set_config() {
    Config& c = weights_->config;
    c.vocab = 129280, c.d_model = 5120, c.d_ff = 2304, c.n_layers = 9, c.n_heads = 64, c.head_dim = 512, c.rope_dim = 64;
    c.q_lora_rank = 1280, c.o_lora_rank = 1024, c.o_groups = 8, c.swiglu_limit = 10, c.rms_norm_eps = 1e-20, c.max_positions = 1048576;
    c.rope_theta = 10000, c.compress_rope_theta = 160000, c.yarn = {16, 32, 1, 65536};
    c.n_experts = 384, c.n_active = 6, c.routed_scale = 1.5, c.gate_temp = 1, c.window = 128;
    c.compress_ratios = {0, 0, 2, 2, 2, 1, 1, 1, 1};
    c.kv_sources = {2, 4, 5}, c.index_sources = {2, 4, 5, 7};
    c.index_n_heads = 32, c.index_head_dim = 128, c.index_topk = 512;
    c.candidate_source = 5, c.candidate_topk_blocks = 2048, c.candidate_block_size = 8;
    c.n_streams = 4, c.sinkhorn_iters = 20, c.hc_eps = 1e-6;
    // The tables are small (their rows are gathered on the host); everything else is of the released size.
    c.engram.layers = {1, 4}, c.engram.max_ngram = 4, c.engram.vocab = 1000, c.engram.n_heads = 8, c.engram.head_dim = 256;
    c.engram.pad_token_id = 2, c.engram.n_classes = 99092;
    c.engram.n_rows = {0, 0};
    // Sums of consecutive primes from `vocab` on.
    int64_t candidate = c.engram.vocab;
    for (int64_t& sum : c.engram.n_rows) {
      for (int64_t found = 0; found < c.engram.n_columns();) {
        bool is_prime = true;
        for (int64_t q = 2; q * q <= candidate; ++q) is_prime = is_prime && candidate % q != 0;
        if (is_prime) sum += candidate, ++found;
        ++candidate;
      }
    }
    out_.kinds = {"window", "window, Engram", "ratio 2 source", "ratio 2", "ratio 2 source, Engram", "ratio 1 source", "ratio 1", "ratio 1 index", "ratio 1"};
  }

  Result<void*> filled(size_t size_bytes, Fill fill, float size, int scale_code = 0) {
    const size_t units = (size_bytes + 7) / 8;
    ASSIGN_OR_RETURN(uint8_t* to, weights_->arena().take(units * 8, "synthetic weights"));
    fill_kernel<<<2048, 256, 0, stream_.handle()>>>(reinterpret_cast<uint64_t*>(to), units, ++seed_ << 40, fill, size, scale_code);
    RETURN_IF_ERROR(stream_.launched("fill_kernel"));
    bytes_ += static_cast<double>(size_bytes);
    return static_cast<void*>(to);
  }

  Result<const float*> ones(int64_t n, float value) {
    const std::vector<float> values(static_cast<size_t>(n), value);
    ASSIGN_OR_RETURN(uint8_t* to, weights_->arena().take(values.size() * sizeof(float), "synthetic weights"));
    RETURN_IF_ERROR(stream_.copy_to_device(to, values.data(), values.size() * sizeof(float)));
    return reinterpret_cast<const float*>(to);
  }

  Result<DeviceWeight> native(int64_t in, int64_t out, NativeForm form) {
    const float size = 1 / std::sqrt(static_cast<float>(in));
    ops::cuda::NativeWeight w;
    w.form = form, w.in = in, w.out = out;
    const size_t n = static_cast<size_t>(in * out);
    if (form == NativeForm::kF32 || form == NativeForm::kBf16) {
      ASSIGN_OR_RETURN(void* to, filled(n * (form == NativeForm::kF32 ? 4 : 2), form == NativeForm::kF32 ? Fill::kF32 : Fill::kBf16, size));
      w.weight = static_cast<const uint8_t*>(to);
      return codec::cuda::weight_of(w);
    }
    // Random codes have an rms of about 0.8 (e4m3 below 2) and 2.8 (e2m1).
    const bool is_fp8 = form == NativeForm::kFp8;
    const int code = 127 + static_cast<int>(std::lround(std::log2(size / (is_fp8 ? 0.8f : 2.8f))));
    ASSIGN_OR_RETURN(void* to, filled(is_fp8 ? n : n / 2, is_fp8 ? Fill::kFp8 : Fill::kBits, 0));
    w.weight = static_cast<const uint8_t*>(to);
    w.block_rows = is_fp8 ? 32 : 1;
    w.scale_cols = in / 32;
    ASSIGN_OR_RETURN(void* scales, filled(n / static_cast<size_t>(32 * w.block_rows), Fill::kScales, 0, code));
    w.scale = static_cast<const uint8_t*>(scales);
    return codec::cuda::weight_of(w);
  }

  Result<DeviceWeight> exl3(int64_t in, int64_t out, int k2) {
    weights_->max_in = std::max(weights_->max_in, in), weights_->max_out = std::max(weights_->max_out, out);
    ASSIGN_OR_RETURN(void* blocks, filled(static_cast<size_t>(codec::cuda::layout_words(in, out, k2)) * 4, Fill::kBits, 0));
    ASSIGN_OR_RETURN(void* suh, filled(static_cast<size_t>(in) * 2, Fill::kF16Signs, 1 / std::sqrt(static_cast<float>(in))));
    ASSIGN_OR_RETURN(void* svh, filled(static_cast<size_t>(out) * 2, Fill::kF16Signs, 1.0f));
    return codec::cuda::weight_of(codec::cuda::DeviceMatrix{static_cast<const uint32_t*>(blocks), static_cast<const uint16_t*>(suh),
                                                            static_cast<const uint16_t*>(svh), in, out, k2, codec::Codebook::kMul1});
  }

  Result<DeviceWeight> dense(int64_t in, int64_t out, NativeForm form = NativeForm::kFp8) {
    return options_.form == Form::kNative ? native(in, out, form) : exl3(in, out, options_.dense_k2);
  }

  Status mix(cuda::DeviceMix& to) {
    const Config& c = weights_->config;
    ASSIGN_OR_RETURN(to.fn, native(c.n_streams * c.d_model, c.n_mix(), NativeForm::kF32));
    ASSIGN_OR_RETURN(to.base, ones(c.n_mix(), 0.1f));
    ASSIGN_OR_RETURN(to.scale, ones(3, 0.5f));
    return ok_status();
  }

  Status attention(int layer, cuda::DeviceAttention& to) {
    const Config& c = weights_->config;
    ASSIGN_OR_RETURN(to.sink, ones(c.n_heads, 0));
    ASSIGN_OR_RETURN(to.q_norm, ones(c.q_lora_rank, 1));
    ASSIGN_OR_RETURN(to.kv_norm, ones(c.head_dim, 1));
    const std::vector<float> f = c.ratio(layer) == 0 ? ops::rope_frequencies(c.rope_dim, c.rope_theta)
                                                     : ops::yarn_frequencies(c.rope_dim, c.compress_rope_theta, {16, 32, 1, 65536});
    ASSIGN_OR_RETURN(uint8_t* frequencies, weights_->arena().take(f.size() * sizeof(float), "synthetic weights"));
    RETURN_IF_ERROR(stream_.copy_to_device(frequencies, f.data(), f.size() * sizeof(float)));
    to.frequencies = reinterpret_cast<const float*>(frequencies);
    ASSIGN_OR_RETURN(to.wq_a, dense(c.d_model, c.q_lora_rank));
    ASSIGN_OR_RETURN(to.wq_b, dense(c.q_lora_rank, c.n_heads * c.head_dim));
    ASSIGN_OR_RETURN(to.wkv, dense(c.d_model, c.head_dim));
    for (int64_t g = 0; g < c.o_groups; ++g) {
      ASSIGN_OR_RETURN(DeviceWeight slice, dense(c.n_heads / c.o_groups * c.head_dim, c.o_lora_rank));
      to.wo_a.push_back(slice);
    }
    ASSIGN_OR_RETURN(to.wo_b, dense(c.o_groups * c.o_lora_rank, c.d_model));
    if (c.is_kv_source(layer)) {
      to.compressor.emplace();
      ASSIGN_OR_RETURN(to.compressor->wkv, native(c.d_model, c.head_dim, NativeForm::kBf16));
      if (c.ratio(layer) > 1) {
        ASSIGN_OR_RETURN(to.compressor->wgate, native(c.d_model, c.head_dim, NativeForm::kBf16));
      }
      ASSIGN_OR_RETURN(to.compressor->norm, ones(c.head_dim, 1));
    }
    if (c.is_index_source(layer)) {
      to.indexer.emplace();
      ASSIGN_OR_RETURN(to.indexer->wq_b, dense(c.q_lora_rank, c.index_n_heads * c.index_head_dim));
      ASSIGN_OR_RETURN(to.indexer->weights_proj, native(c.d_model, c.index_n_heads, NativeForm::kBf16));
      if (c.is_kv_source(layer)) {
        ASSIGN_OR_RETURN(to.indexer->wk, native(c.head_dim, c.index_head_dim, NativeForm::kBf16));
        ASSIGN_OR_RETURN(to.indexer->k_norm, ones(c.index_head_dim, 1));
      }
    }
    return ok_status();
  }

  Result<const DeviceWeight*> upload(const std::vector<DeviceWeight>& of) {
    ASSIGN_OR_RETURN(uint8_t* to, weights_->arena().take(of.size() * sizeof(DeviceWeight), "synthetic experts"));
    RETURN_IF_ERROR(stream_.copy_to_device(to, of.data(), of.size() * sizeof(DeviceWeight)));
    return reinterpret_cast<const DeviceWeight*>(to);
  }

  Status moe(cuda::DeviceMoe& to) {
    const Config& c = weights_->config;
    ASSIGN_OR_RETURN(to.gate, native(c.d_model, c.n_experts, NativeForm::kBf16));
    ASSIGN_OR_RETURN(to.bias, ones(c.n_experts, 0));
    to.n_experts = c.n_experts;
    ASSIGN_OR_RETURN(to.shared_w1, dense(c.d_model, c.d_ff));
    ASSIGN_OR_RETURN(to.shared_w3, dense(c.d_model, c.d_ff));
    ASSIGN_OR_RETURN(to.shared_w2, dense(c.d_ff, c.d_model));
    out_.dense_bytes.push_back(bytes_);
    bytes_ = 0;
    const CounterRng rng(5, "widths");
    std::vector<DeviceWeight> w[3];
    for (int64_t e = 0; e < c.n_experts; ++e) {
      for (int m = 0; m < 3; ++m) {
        const int64_t in = m == 2 ? c.d_ff : c.d_model, out = m == 2 ? c.d_model : c.d_ff;
        const int k2 = options_.expert_k2s[rng.bits(static_cast<uint64_t>(3 * e + m)) % options_.expert_k2s.size()];
        ASSIGN_OR_RETURN(DeviceWeight matrix, options_.form == Form::kNative ? native(in, out, NativeForm::kMxfp4) : exl3(in, out, k2));
        w[m].push_back(matrix);
      }
    }
    out_.expert_bytes.push_back(bytes_ / static_cast<double>(c.n_experts));
    if (options_.products != Products::kExact) {
      ASSIGN_OR_RETURN(to.table, cuda::integer_table(stream_, w[0], w[1], w[2]));
      weights_->has_tables = weights_->has_tables || to.table != nullptr;
    }
    ASSIGN_OR_RETURN(to.w1, upload(w[0]));
    ASSIGN_OR_RETURN(to.w3, upload(w[1]));
    ASSIGN_OR_RETURN(to.w2, upload(w[2]));
    return ok_status();
  }

  Status make_block(int layer, cuda::DeviceBlock& to) {
    const Config& c = weights_->config;
    ASSIGN_OR_RETURN(to.attn_norm, ones(c.d_model, 1));
    ASSIGN_OR_RETURN(to.ffn_norm, ones(c.d_model, 1));
    RETURN_IF_ERROR(mix(to.hc_attn));
    RETURN_IF_ERROR(mix(to.hc_ffn));
    RETURN_IF_ERROR(attention(layer, to.attn));
    const int slot = c.engram_slot(layer);
    if (slot >= 0) {
      to.engram.emplace();
      const int64_t n_rows = c.engram.n_rows[static_cast<size_t>(slot)];
      auto codes = std::make_shared<Tensor>(DType::kF8E4M3, Shape{n_rows, c.engram.head_dim});
      auto scales = std::make_shared<Tensor>(DType::kF8E8M0, Shape{n_rows, c.engram.head_dim / 32});
      const CounterRng rng(6, "engram");
      for (int64_t i = 0; i < codes->size_bytes(); ++i) static_cast<uint8_t*>(codes->data())[i] = static_cast<uint8_t>(rng.bits(static_cast<uint64_t>(i)) & 0xBF);
      for (int64_t i = 0; i < scales->size_bytes(); ++i) static_cast<uint8_t*>(scales->data())[i] = 127;
      to.engram->table = {codes->view(), scales->view(), "synthetic"};
      tables_.push_back(codes), tables_.push_back(scales);
      ASSIGN_OR_RETURN(to.engram->wkv, dense(c.engram.d_concat(), (c.n_streams + 1) * c.d_model));
      ASSIGN_OR_RETURN(to.engram->q_weight, ones(c.n_streams * c.d_model, 1));
      ASSIGN_OR_RETURN(to.engram->k_weight, ones(c.n_streams * c.d_model, 1));
    }
    return moe(to.moe);
  }

  const SyntheticOptions options_;
  device::Stream stream_;
  std::shared_ptr<cuda::DeviceWeights> weights_;
  SyntheticNetwork out_;
  uint64_t seed_ = 0;
  double bytes_ = 0;
  std::vector<std::shared_ptr<Tensor>> tables_;
};

}  // namespace

Result<SyntheticNetwork> make_network(const SyntheticOptions& options) {
  ASSIGN_OR_RETURN(device::Stream stream, device::Stream::create(0));
  // The maker owns the Engram tables, which live as long as the program.
  Maker* maker = new Maker(options, std::move(stream));
  return maker->all();
}

}  // namespace espalier::bench
