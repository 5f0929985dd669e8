// One pass of a chunk of rows through the layers on a GPU, as launches or as a recorded graph.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "model/cuda/network_impl.h"
#include "ops/cuda/streams.h"

namespace espalier::cuda {
namespace {

constexpr int64_t kRecordedRows = 8;    // passes of up to so many rows are recorded, and those of a whole chunk
constexpr size_t kMaxRecorded = 48;     // more than that: forget all and start again
constexpr int64_t kInputHeader = 16;    // bytes before the ids

int64_t ids_bytes(int64_t n) { return (n * static_cast<int64_t>(sizeof(int32_t)) + 15) / 16 * 16; }

}  // namespace

const float* DeviceSequence::Impl::device_engram(int64_t n, size_t slot) const {
  const float* rows = reinterpret_cast<const float*>(static_cast<const uint8_t*>(inputs.data()) + kInputHeader + ids_bytes(n));
  return rows + static_cast<int64_t>(slot) * n * config.engram.d_concat();
}

Status DeviceSequence::Impl::send_inputs(std::span<const int32_t> ids, int64_t start, bool with_engram) {
  const EngramConfig& e = config.engram;
  const int64_t n = static_cast<int64_t>(ids.size()), width = e.d_concat(), n_columns = e.n_columns();
  const size_t n_slots = with_engram ? e.layers.size() : 0;
  const size_t size = static_cast<size_t>(kInputHeader + ids_bytes(n)) + n_slots * static_cast<size_t>(n * width) * sizeof(float);
  if (pinned_inputs.size_bytes() < size) {
    ASSIGN_OR_RETURN(pinned_inputs, device::PinnedBuffer::allocate(2 * size, "inputs of a pass"));
    ASSIGN_OR_RETURN(inputs, device::DeviceBuffer::allocate(stream.device(), 2 * size, "inputs of a pass"));
    passes.clear();
  }
  uint8_t* host = static_cast<uint8_t*>(pinned_inputs.data());
  std::memcpy(host, &start, sizeof(start));
  std::memcpy(host + kInputHeader, ids.data(), ids.size_bytes());
  const int32_t pad = n_slots > 0 ? weights.engram_token_map[static_cast<size_t>(e.pad_token_id)] : 0;
  std::vector<int64_t> columns(static_cast<size_t>(n_columns));
  float* to = reinterpret_cast<float*>(host + kInputHeader + ids_bytes(n));
  for (size_t slot = 0; slot < n_slots; ++slot) {
    const EngramTable& table = weights.layers[static_cast<size_t>(e.layers[slot])].engram->table;
    for (int64_t t = 0; t < n; ++t, to += width) {
      engram_rows(weights.engram_hashes[slot], engram_history, start + t, pad, e.n_heads, columns.data());
      for (int64_t i = 0; i < n_columns; ++i) RETURN_IF_ERROR(read_engram_row(table, columns[static_cast<size_t>(i)], to + i * e.head_dim));
    }
  }
  return stream.copy_to_device(inputs.data(), host, size);
}

Result<DeviceRows> DeviceSequence::Impl::begin_rows(int64_t start, int64_t n) {
  const int64_t d = config.d_model, n_streams = config.n_streams;
  DeviceRows rows;
  rows.start = device_start();
  rows.is_first = start == 0;
  rows.n = n;
  ASSIGN_OR_RETURN(rows.h, workspace.take<float>(n * n_streams * d));
  ASSIGN_OR_RETURN(rows.next, workspace.take<float>(n * n_streams * d));
  ASSIGN_OR_RETURN(rows.pre, workspace.take<float>(n * n_streams));
  ASSIGN_OR_RETURN(rows.positions, workspace.take<int64_t>(n));
  RETURN_IF_ERROR(fill_positions(stream, rows.start, 1, n, rows.positions));
  RETURN_IF_ERROR(embed_rows(stream, weights.embed, device_ids(), n, n_streams, d, rows.h, rows.pre));
  return rows;
}

Status DeviceSequence::Impl::run_engram(Run& run, const DeviceEngram& w, const float* e, DeviceRows& rows) {
  const Workspace::Mark mark = workspace.mark();
  stream.begin_part("Engram");
  ASSIGN_OR_RETURN(const float* kv, run.project(w.wkv, e, rows.n, Rounding::kActQuant));
  RETURN_IF_ERROR(ops::cuda::engram_gate(
      stream, {rows.h, kv, w.q_weight, w.k_weight, rows.n, config.n_streams, config.d_model, config.rms_norm_eps}, run.order()));
  RETURN_IF_ERROR(run.round_if_vendor(rows.h, rows.n * config.n_streams * config.d_model));
  workspace.reset(mark);
  return ok_status();
}

Result<float*> DeviceSequence::Impl::queue_pass(const PassKey& key, int64_t start) {
  const Config& c = config;
  const int64_t n = key.n;
  const std::string tokens = std::to_string(n) + " tokens from " + std::to_string(start);
  workspace.reset({});
  stream.begin_step(tokens);
  ASSIGN_OR_RETURN(DeviceRows rows, begin_rows(start, n));
  rows.phase = key.phase;
  int64_t most_entries = 0;
  for (const CompressedRows& compressed : cache.compressed) most_entries = std::max(most_entries, compressed.capacity);
  rows.selected_stride = std::min(most_entries, c.index_topk);
  ASSIGN_OR_RETURN(rows.selected, workspace.take<int32_t>(n * rows.selected_stride));
  ASSIGN_OR_RETURN(rows.n_selected, workspace.take<int64_t>(n));
  if (c.candidate_source >= 0) {
    const int64_t n_blocks = (most_entries + c.candidate_block_size - 1) / c.candidate_block_size;
    ASSIGN_OR_RETURN(rows.candidates, workspace.take<uint8_t>(n * n_blocks));
  }
  Run run = this->run();
  for (int l = 0; l < c.n_layers; ++l) {
    const DeviceBlock& w = weights.layers[static_cast<size_t>(l)];
    stream.begin_step("layer " + std::to_string(l) + " of " + tokens);
    if (w.engram) RETURN_IF_ERROR(run_engram(run, *w.engram, device_engram(n, static_cast<size_t>(c.engram_slot(l))), rows));
    for (size_t i = 0; key.taps != nullptr && i < c.drafter.target_layers.size(); ++i) {
      if (c.drafter.target_layers[i] != l) continue;
      float* out = const_cast<float*>(key.taps) + static_cast<int64_t>(i) * c.d_model;
      RETURN_IF_ERROR(mean_of_streams(stream, rows.h, n, c.n_streams, c.d_model, out, taps_width()));
      for (int64_t t = 0; options.numerics == Numerics::kVendor && t < n; ++t) {
        RETURN_IF_ERROR(run.round_if_vendor(out + t * taps_width(), c.d_model));
      }
    }
    RETURN_IF_ERROR(run.block(w, c.n_active, rows, [&](const float* x, float* y) { return run.layer_attention(w.attn, l, cache, rows, x, y); }));
  }
  if (key.n_logits == 0) return static_cast<float*>(nullptr);
  stream.begin_step("logits of " + tokens);
  stream.begin_part("head");
  ASSIGN_OR_RETURN(float* x, workspace.take<float>(key.n_logits * c.d_model));
  RETURN_IF_ERROR(run.collapse(rows, n - key.n_logits, x));
  RETURN_IF_ERROR(run.normalise(x, weights.norm, c.d_model, key.n_logits, x));
  return run.project(weights.head, x, key.n_logits, Rounding::kNone);
}

// taps: device memory for the rows' drafter inputs, or null. logits: host memory, or null when the chunk's are not wanted.
Status DeviceSequence::Impl::forward_chunk(std::span<const int32_t> ids, bool all_logits, float* chunk_taps, float* logits) {
  const Config& c = config;
  const int64_t start = position.n_tokens(), n = static_cast<int64_t>(ids.size());
  if (!c.engram.layers.empty()) {
    engram_history.resize(static_cast<size_t>(start));
    for (int32_t id : ids) engram_history.push_back(weights.engram_token_map[static_cast<size_t>(id)]);
  }
  stream.begin_step("inputs of " + std::to_string(n) + " tokens from " + std::to_string(start));
  PassKey key{n, 0, logits == nullptr ? 0 : all_logits ? n : 1, chunk_taps};
  int64_t period = 1;
  for (int l = 0; l < c.n_layers; ++l) {
    if (!c.is_kv_source(l)) continue;
    CompressedRows& rows = cache.compressed[static_cast<size_t>(l)];
    const int64_t before = rows.capacity;
    RETURN_IF_ERROR(cache.reserve(stream, c, rows, (start + n) / c.ratio(l)));
    if (rows.capacity != before) passes.clear();  // the caches have moved, and sizes follow them
    period = std::lcm(period, static_cast<int64_t>(c.ratio(l)));
  }
  key.phase = start % period;
  RETURN_IF_ERROR(stream.mark("host before a pass"));
  RETURN_IF_ERROR(send_inputs(ids, start, true));

  float* on_device = nullptr;
  const bool is_recordable = options.uses_graphs && options.numerics != Numerics::kVendor && (n <= kRecordedRows || n == options.chunk);
  if (passes.size() > kMaxRecorded) passes.clear();
  const auto seen = is_recordable ? passes.find(key) : passes.end();
  if (seen == passes.end()) {
    ASSIGN_OR_RETURN(on_device, queue_pass(key, start));
    if (is_recordable) passes.emplace(key, std::nullopt);
  } else {
    if (!seen->second || stream.is_profiling()) {
      ASSIGN_OR_RETURN(device::Graph graph, device::Graph::capture(stream, [&]() -> Status {
        ASSIGN_OR_RETURN(on_device, queue_pass(key, start));
        return ok_status();
      }));
      seen->second.emplace(Recorded{std::move(graph), on_device});
      RETURN_IF_ERROR(stream.mark("recording"));
    }
    RETURN_IF_ERROR(seen->second->graph.launch(stream));
    on_device = seen->second->logits;
  }
  if (logits != nullptr) {
    const size_t size = static_cast<size_t>(key.n_logits * c.vocab) * sizeof(float);
    if (pinned_logits.size_bytes() < size) {
      ASSIGN_OR_RETURN(pinned_logits, device::PinnedBuffer::allocate(size, "logits"));
    }
    RETURN_IF_ERROR(stream.copy_to_host(pinned_logits.data(), on_device, size));
    RETURN_IF_ERROR(stream.synchronize());
    std::memcpy(logits, pinned_logits.data(), size);
  } else {
    RETURN_IF_ERROR(stream.synchronize());  // the inputs have been read
  }
  // A graph with the marks of a profile is of no further use.
  if (stream.is_profiling() && seen != passes.end()) seen->second.reset();
  position.advance(n);
  return ok_status();
}

}  // namespace espalier::cuda
