#include "model/cuda/network.h"

#include <algorithm>
#include <cstring>

#include "device/cuda_status.cuh"
#include "device/device.h"
#include "device/pinned.h"
#include "model/block.h"
#include "model/cuda/run.h"
#include "ops/cuda/rows.h"
#include "ops/cuda/streams.h"

namespace espalier::cuda {

Result<std::shared_ptr<const DeviceModel>> DeviceModel::load(const std::string& dir, const LoadOptions& options, int device, ThreadPool& pool) {
  RETURN_IF_ERROR(device::find_device(device).status());
  const device::ScopedDevice scope(device);
  ESPALIER_CUDA_TRY("device " + std::to_string(device), scope.status());
  ASSIGN_OR_RETURN(auto weights, DeviceWeights::load(dir, options, device, pool));
  return std::make_shared<const DeviceModel>(std::move(weights));
}

const Config& DeviceModel::config() const { return weights_->config; }
int DeviceModel::device() const { return weights_->device; }
int64_t DeviceModel::size_bytes() const { return static_cast<int64_t>(weights_->size_bytes()); }

struct DeviceSequence::Impl {
  Impl(std::shared_ptr<const DeviceModel> of, const SequenceOptions& with, device::Stream on, SequenceCache caches, codec::cuda::ExpertPlan experts)
      : model(std::move(of)),
        weights(*model->weights()),
        config(weights.config),
        options(with),
        stream(std::move(on)),
        cache(std::move(caches)),
        workspace(weights.device),
        plan(std::move(experts)) {}

  Run run() { return Run(weights, options.numerics, stream, workspace, plan); }
  int64_t taps_width() const { return static_cast<int64_t>(config.drafter.target_layers.size()) * config.d_model; }

  Status check_ids(std::span<const int32_t> ids) const;
  // Gathers the Engram rows of `ids` (the history holds them already) into pinned memory and queues the copies.
  Status gather_engram(int64_t start, int64_t n, std::vector<float*>& rows);
  Status forward_chunk(std::span<const int32_t> ids, bool all_logits, float* taps, float* logits);
  Status run_engram(Run& run, const DeviceEngram& w, const float* e, DeviceRows& rows);
  Result<DeviceRows> begin_rows(const int32_t* ids, int64_t start, int64_t n);
  Status logits_of(Run& run, const float* hidden, int64_t n, float* logits);

  std::shared_ptr<const DeviceModel> model;
  const DeviceWeights& weights;
  const Config& config;
  const SequenceOptions options;
  device::Stream stream;
  SequenceCache cache;
  Workspace workspace;
  codec::cuda::ExpertPlan plan;
  SequencePosition position;
  std::vector<int32_t> engram_history;
  device::PinnedBuffer pinned;
  // Drafter.
  device::DeviceArray<float> taps;   // [n_taps_rows, taps_width] of the last call
  int64_t n_taps_rows = 0;
  int64_t taps_start = 0;
  device::DeviceArray<float> rings;  // [n_stages, window, head_dim]
  int64_t n_seeded = 0;
};

Status DeviceSequence::Impl::check_ids(std::span<const int32_t> ids) const {
  const int64_t start = position.n_tokens(), n = static_cast<int64_t>(ids.size());
  if (n == 0) return invalid_argument("tokens: expected at least one id, found none");
  if (n > config.max_positions - start) {
    return resource_exhausted("tokens: expected at most " + std::to_string(config.max_positions) +
                              " positions (max_position_embeddings), found " + std::to_string(start + n) + "; shorten the prompt");
  }
  const int64_t n_ids = config.engram.layers.empty()
                            ? config.vocab
                            : std::min<int64_t>(config.vocab, static_cast<int64_t>(weights.engram_token_map.size()));
  for (int64_t t = 0; t < n; ++t) {
    const int32_t id = ids[static_cast<size_t>(t)];
    if (id < 0 || id >= n_ids) {
      return invalid_argument("tokens: position " + std::to_string(start + t) + ": expected an id in 0.." + std::to_string(n_ids - 1) +
                              ", found " + std::to_string(id));
    }
    if (id == config.image_token_id) {
      return invalid_argument("tokens: position " + std::to_string(start + t) + ": found the image token " + std::to_string(id) +
                              "; images are not supported, use text only");
    }
  }
  return ok_status();
}

Status DeviceSequence::Impl::gather_engram(int64_t start, int64_t n, std::vector<float*>& rows) {
  const EngramConfig& e = config.engram;
  const int64_t width = e.d_concat(), n_columns = e.n_columns();
  const size_t layer_bytes = static_cast<size_t>(n * width) * sizeof(float), all_bytes = layer_bytes * e.layers.size();
  if (all_bytes == 0) return ok_status();
  if (pinned.size_bytes() < all_bytes) {
    ASSIGN_OR_RETURN(pinned, device::PinnedBuffer::allocate(all_bytes, "Engram rows"));
  }
  const int32_t pad = weights.engram_token_map[static_cast<size_t>(e.pad_token_id)];
  std::vector<int64_t> columns(static_cast<size_t>(n_columns));
  for (size_t slot = 0; slot < e.layers.size(); ++slot) {
    const EngramTable& table = weights.layers[static_cast<size_t>(e.layers[slot])].engram->table;
    float* host = static_cast<float*>(pinned.data()) + static_cast<int64_t>(slot) * n * width;
    for (int64_t t = 0; t < n; ++t) {
      engram_rows(weights.engram_hashes[slot], engram_history, start + t, pad, e.n_heads, columns.data());
      for (int64_t i = 0; i < n_columns; ++i) {
        RETURN_IF_ERROR(read_engram_row(table, columns[static_cast<size_t>(i)], host + t * width + i * e.head_dim));
      }
    }
    ASSIGN_OR_RETURN(float* to, workspace.take<float>(n * width));
    RETURN_IF_ERROR(stream.copy_to_device(to, host, layer_bytes));
    rows.push_back(to);
  }
  return ok_status();
}

Status DeviceSequence::Impl::run_engram(Run& run, const DeviceEngram& w, const float* e, DeviceRows& rows) {
  const Workspace::Mark mark = workspace.mark();
  stream.begin_part("Engram");
  ASSIGN_OR_RETURN(const float* kv, run.project(w.wkv, e, rows.n, Rounding::kActQuant));
  RETURN_IF_ERROR(ops::cuda::engram_gate(
      stream, {rows.h, kv, w.q_weight, w.k_weight, rows.n, config.n_streams, config.d_model, config.rms_norm_eps}));
  RETURN_IF_ERROR(run.round_if_vendor(rows.h, rows.n * config.n_streams * config.d_model));
  workspace.reset(mark);
  return ok_status();
}

Result<DeviceRows> DeviceSequence::Impl::begin_rows(const int32_t* ids, int64_t start, int64_t n) {
  const int64_t d = config.d_model, n_streams = config.n_streams;
  DeviceRows rows;
  rows.start = start;
  rows.n = n;
  ASSIGN_OR_RETURN(int32_t* device_ids, workspace.take<int32_t>(n));
  ASSIGN_OR_RETURN(rows.h, workspace.take<float>(n * n_streams * d));
  ASSIGN_OR_RETURN(rows.next, workspace.take<float>(n * n_streams * d));
  ASSIGN_OR_RETURN(rows.pre, workspace.take<float>(n * n_streams));
  ASSIGN_OR_RETURN(rows.positions, workspace.take<int64_t>(n));
  RETURN_IF_ERROR(stream.copy_to_device(device_ids, ids, static_cast<size_t>(n) * sizeof(int32_t)));
  RETURN_IF_ERROR(fill_positions(stream, start, 1, n, rows.positions));
  RETURN_IF_ERROR(embed_rows(stream, weights.embed, device_ids, n, n_streams, d, rows.h, rows.pre));
  return rows;
}

Status DeviceSequence::Impl::logits_of(Run& run, const float* hidden, int64_t n, float* logits) {
  ASSIGN_OR_RETURN(const float* out, run.project(weights.head, hidden, n, Rounding::kNone));
  return stream.copy_to_host(logits, out, static_cast<size_t>(n * config.vocab) * sizeof(float));
}

// taps: device memory for the rows' drafter inputs, or null. logits: host memory, or null when the chunk's are not wanted.
Status DeviceSequence::Impl::forward_chunk(std::span<const int32_t> ids, bool all_logits, float* chunk_taps, float* logits) {
  const Config& c = config;
  const int64_t start = position.n_tokens(), n = static_cast<int64_t>(ids.size());
  workspace.reset({});
  if (!c.engram.layers.empty()) {
    engram_history.resize(static_cast<size_t>(start));
    for (int32_t id : ids) engram_history.push_back(weights.engram_token_map[static_cast<size_t>(id)]);
  }
  stream.begin_step("tokens " + std::to_string(start) + " to " + std::to_string(start + n - 1));
  std::vector<float*> engram_inputs;
  RETURN_IF_ERROR(gather_engram(start, n, engram_inputs));
  ASSIGN_OR_RETURN(DeviceRows rows, begin_rows(ids.data(), start, n));
  int64_t most_visible = 0;
  for (int l = 0; l < c.n_layers; ++l) {
    if (c.ratio(l) > 0) most_visible = std::max(most_visible, (start + n) / c.ratio(l));
  }
  rows.selected_stride = std::min(most_visible, c.index_topk);
  ASSIGN_OR_RETURN(rows.selected, workspace.take<int32_t>(n * rows.selected_stride));
  ASSIGN_OR_RETURN(rows.n_selected, workspace.take<int64_t>(n));
  if (c.candidate_source >= 0) {
    const int64_t n_blocks = (most_visible + c.candidate_block_size - 1) / c.candidate_block_size;
    ASSIGN_OR_RETURN(rows.candidates, workspace.take<uint8_t>(n * n_blocks));
  }
  Run run = this->run();
  for (int l = 0; l < c.n_layers; ++l) {
    const DeviceBlock& w = weights.layers[static_cast<size_t>(l)];
    stream.begin_step("layer " + std::to_string(l) + " of tokens " + std::to_string(start) + " to " + std::to_string(start + n - 1));
    if (w.engram) RETURN_IF_ERROR(run_engram(run, *w.engram, engram_inputs[static_cast<size_t>(c.engram_slot(l))], rows));
    for (size_t i = 0; chunk_taps != nullptr && i < c.drafter.target_layers.size(); ++i) {
      if (c.drafter.target_layers[i] != l) continue;
      float* out = chunk_taps + static_cast<int64_t>(i) * c.d_model;
      RETURN_IF_ERROR(mean_of_streams(stream, rows.h, n, c.n_streams, c.d_model, out, taps_width()));
      for (int64_t t = 0; options.numerics == Numerics::kVendor && t < n; ++t) {
        RETURN_IF_ERROR(run.round_if_vendor(out + t * taps_width(), c.d_model));
      }
    }
    RETURN_IF_ERROR(run.block(w, c.n_active, rows, [&](const float* x, float* y) { return run.layer_attention(w.attn, l, cache, rows, x, y); }));
  }
  if (logits != nullptr) {
    stream.begin_step("logits of tokens " + std::to_string(start) + " to " + std::to_string(start + n - 1));
    stream.begin_part("head");
    const int64_t n_out = all_logits ? n : 1;
    ASSIGN_OR_RETURN(float* x, workspace.take<float>(n_out * c.d_model));
    RETURN_IF_ERROR(run.collapse(rows, n - n_out, x));
    RETURN_IF_ERROR(run.normalise(x, weights.norm, c.d_model, n_out, x));
    RETURN_IF_ERROR(logits_of(run, x, n_out, logits));
  }
  RETURN_IF_ERROR(stream.synchronize());
  position.advance(n);
  return ok_status();
}

DeviceSequence::DeviceSequence(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
DeviceSequence::~DeviceSequence() = default;

Result<std::unique_ptr<DeviceSequence>> DeviceSequence::create(std::shared_ptr<const DeviceModel> model, const SequenceOptions& options) {
  const Config& c = model->config();
  const device::ScopedDevice scope(model->device());
  ESPALIER_CUDA_TRY("device " + std::to_string(model->device()), scope.status());
  if (options.chunk < 1) return invalid_argument("sequence: expected a chunk of at least 1 row, found " + std::to_string(options.chunk));
  if (options.with_drafter && c.drafter.n_stages == 0) {
    return failed_precondition("drafter: this model has none (num_nextn_predict_layers is 0)");
  }
  ASSIGN_OR_RETURN(device::Stream stream, device::Stream::create(model->device()));
  ASSIGN_OR_RETURN(SequenceCache cache, SequenceCache::create(stream, c));
  const int64_t n_rows = std::max(options.chunk, c.drafter.block_size), n_active = std::max(c.n_active, c.drafter.n_active);
  ASSIGN_OR_RETURN(codec::cuda::ExpertPlan plan, codec::cuda::ExpertPlan::create(stream, n_rows * n_active, std::max(c.n_experts, c.drafter.n_experts)));
  auto impl = std::make_unique<Impl>(std::move(model), options, std::move(stream), std::move(cache), std::move(plan));
  if (options.with_drafter) {
    ASSIGN_OR_RETURN(impl->rings, device::DeviceArray<float>::allocate(impl->stream.device(), static_cast<size_t>(c.drafter.n_stages * c.window * c.head_dim), "drafter rings"));
  }
  return std::unique_ptr<DeviceSequence>(new DeviceSequence(std::move(impl)));
}

device::Stream& DeviceSequence::stream() { return impl_->stream; }
int64_t DeviceSequence::n_tokens() const { return impl_->position.n_tokens(); }

Status DeviceSequence::truncate(int64_t n_tokens) {
  RETURN_IF_ERROR(impl_->position.truncate(n_tokens));
  if (n_tokens == 0) {
    reset();
  } else if (!impl_->engram_history.empty()) {
    impl_->engram_history.resize(static_cast<size_t>(n_tokens));
  }
  return ok_status();
}

void DeviceSequence::reset() {
  impl_->position.reset();
  impl_->engram_history.clear();
  impl_->n_taps_rows = 0;
  impl_->n_seeded = 0;
}

Result<Tensor> DeviceSequence::forward(std::span<const int32_t> ids, bool all_logits) {
  Impl& s = *impl_;
  RETURN_IF_ERROR(s.check_ids(ids));
  const device::ScopedDevice scope(s.weights.device);
  ESPALIER_CUDA_TRY("device " + std::to_string(s.weights.device), scope.status());
  const int64_t n = static_cast<int64_t>(ids.size()), width = s.taps_width();
  Tensor logits(DType::kF32, {all_logits ? n : 1, s.config.vocab});
  if (s.options.with_drafter) {
    if (s.taps.size() < static_cast<size_t>(n * width)) {
      ASSIGN_OR_RETURN(s.taps, device::DeviceArray<float>::allocate(s.stream.device(), static_cast<size_t>(n * width), "drafter inputs"));
    }
    s.n_taps_rows = n;
    s.taps_start = s.position.n_tokens();
  }
  for (int64_t done = 0; done < n; done += s.options.chunk) {
    const int64_t rows = std::min(s.options.chunk, n - done);
    const bool is_wanted = all_logits || done + rows == n;
    RETURN_IF_ERROR(s.forward_chunk(ids.subspan(static_cast<size_t>(done), static_cast<size_t>(rows)), all_logits,
                                    s.options.with_drafter ? s.taps.data() + done * width : nullptr,
                                    is_wanted ? logits.f32() + (all_logits ? done * s.config.vocab : 0) : nullptr));
  }
  return logits;
}

Status DeviceSequence::seed_drafter(int64_t n_rows) {
  Impl& s = *impl_;
  const Config& c = s.config;
  if (!s.options.with_drafter) return failed_precondition("drafter: the sequence was opened without it");
  if (n_rows > s.n_taps_rows) {
    return invalid_argument("drafter: expected at most the " + std::to_string(s.n_taps_rows) + " rows of the last call, found " + std::to_string(n_rows));
  }
  const device::ScopedDevice scope(s.weights.device);
  ESPALIER_CUDA_TRY("device " + std::to_string(s.weights.device), scope.status());
  // Only the last `window` rows can be seen again.
  const int64_t skip = std::max<int64_t>(0, n_rows - c.window), n = n_rows - skip, start = s.n_seeded + skip;
  if (n > 0) {
    s.workspace.reset({});
    s.stream.begin_step("drafter rows " + std::to_string(start) + " to " + std::to_string(start + n - 1));
    Run run = s.run();
    ASSIGN_OR_RETURN(float* main_x, run.project(s.weights.drafter.main_proj, s.taps.data() + skip * s.taps_width(), n, Rounding::kActQuant));
    RETURN_IF_ERROR(run.normalise(main_x, s.weights.drafter.main_norm, c.d_model, n, main_x));
    ASSIGN_OR_RETURN(int64_t* positions, s.workspace.take<int64_t>(n));
    RETURN_IF_ERROR(fill_positions(s.stream, start, 1, n, positions));
    for (int k = 0; k < c.drafter.n_stages; ++k) {
      const Workspace::Mark mark = s.workspace.mark();
      ASSIGN_OR_RETURN(const float* keys, run.make_window_keys(s.weights.stages[static_cast<size_t>(k)].attn, positions, main_x, n));
      RETURN_IF_ERROR(write_ring(s.stream, keys, start, n, c.window, c.head_dim, s.rings.data() + k * c.window * c.head_dim));
      s.workspace.reset(mark);
    }
    RETURN_IF_ERROR(s.stream.synchronize());
  }
  s.n_seeded += n_rows;
  s.n_taps_rows = 0;
  return ok_status();
}

Result<DraftResult> DeviceSequence::draft(int32_t token) {
  Impl& s = *impl_;
  const Config& c = s.config;
  if (!s.options.with_drafter) return failed_precondition("drafter: the sequence was opened without it");
  if (s.n_seeded == 0) return failed_precondition("drafter: no position has been seeded yet");
  if (token < 0 || token >= c.vocab) {
    return invalid_argument("drafter: expected a token id in 0.." + std::to_string(c.vocab - 1) + ", found " + std::to_string(token));
  }
  const device::ScopedDevice scope(s.weights.device);
  ESPALIER_CUDA_TRY("device " + std::to_string(s.weights.device), scope.status());
  const int64_t n = c.drafter.block_size, d = c.d_model, rank = c.drafter.markov_rank, start = s.n_seeded;
  std::vector<int32_t> ids(static_cast<size_t>(n), c.drafter.noise_token_id);
  ids[0] = token;
  s.workspace.reset({});
  s.stream.begin_step("draft at position " + std::to_string(start));
  ASSIGN_OR_RETURN(DeviceRows rows, s.begin_rows(ids.data(), start, n));
  Run run = s.run();
  const int64_t first = std::max<int64_t>(0, start - c.window), n_places = start - first + n;
  for (int k = 0; k < c.drafter.n_stages; ++k) {
    const DeviceBlock& w = s.weights.stages[static_cast<size_t>(k)];
    RETURN_IF_ERROR(run.block(w, c.drafter.n_active, rows, [&](const float* x, float* y) -> Status {
      ASSIGN_OR_RETURN(const Run::Queries queries, run.make_queries(w.attn, rows.positions, x, n));
      ASSIGN_OR_RETURN(const float* own, run.make_window_keys(w.attn, rows.positions, x, n));
      ASSIGN_OR_RETURN(const float** keys, s.workspace.take<const float*>(n * n_places));
      ASSIGN_OR_RETURN(int64_t* begin, s.workspace.take<int64_t>(n + 1));
      RETURN_IF_ERROR(make_draft_lists(s.stream, {own, s.rings.data() + k * c.window * c.head_dim, start, c.window, c.head_dim}, first, n, keys, begin));
      ASSIGN_OR_RETURN(float* o, run.attend(w.attn, queries.q, keys, begin, n_places, n));
      return run.project_output(w.attn, rows.positions, o, n, y);
    }));
  }
  ASSIGN_OR_RETURN(float* x, s.workspace.take<float>(n * d));
  ASSIGN_OR_RETURN(float* normed, s.workspace.take<float>(n * d));
  RETURN_IF_ERROR(run.collapse(rows, 0, x));
  RETURN_IF_ERROR(run.normalise(x, s.weights.drafter.norm, d, n, normed));
  DraftResult result;
  result.logits = Tensor(DType::kF32, {n, c.vocab});
  result.confidence = Tensor(DType::kF32, {n});
  RETURN_IF_ERROR(s.logits_of(run, normed, n, result.logits.f32()));
  // Each place's Markov term depends on the token chosen before it, so the host walks along the block.
  ASSIGN_OR_RETURN(float* confidence_in, s.workspace.take<float>(d + rank));
  ASSIGN_OR_RETURN(float* bias, s.workspace.take<float>(c.vocab));
  ASSIGN_OR_RETURN(float* confidence, s.workspace.take<float>(1));
  std::vector<float> e(static_cast<size_t>(rank)), host_bias(static_cast<size_t>(c.vocab));
  int32_t previous = token;
  for (int64_t j = 0; j < n; ++j) {
    const Workspace::Mark mark = s.workspace.mark();
    bf16_row(s.weights.drafter.markov_embed, previous, e.data());
    RETURN_IF_ERROR(s.stream.copy_on_device(confidence_in, x + j * d, static_cast<size_t>(d) * sizeof(float)));
    RETURN_IF_ERROR(s.stream.copy_to_device(confidence_in + d, e.data(), static_cast<size_t>(rank) * sizeof(float)));
    RETURN_IF_ERROR(run.project(s.weights.drafter.markov_head, confidence_in + d, rank, 1, Rounding::kNone, bias, c.vocab));
    RETURN_IF_ERROR(run.project(s.weights.drafter.confidence, confidence_in, d + rank, 1, Rounding::kNone, confidence, 1));
    RETURN_IF_ERROR(s.stream.copy_to_host(host_bias.data(), bias, host_bias.size() * sizeof(float)));
    RETURN_IF_ERROR(s.stream.copy_to_host(result.confidence.f32() + j, confidence, sizeof(float)));
    RETURN_IF_ERROR(s.stream.synchronize());
    float* logits = result.logits.f32() + j * c.vocab;
    for (int64_t v = 0; v < c.vocab; ++v) logits[v] += host_bias[static_cast<size_t>(v)];
    previous = static_cast<int32_t>(std::max_element(logits, logits + c.vocab) - logits);
    result.ids.push_back(previous);
    s.workspace.reset(mark);
  }
  return result;
}

}  // namespace espalier::cuda
