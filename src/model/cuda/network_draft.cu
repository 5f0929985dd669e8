// The drafter of a sequence on a GPU.
#include <algorithm>

#include "device/cuda_status.cuh"
#include "device/device.h"
#include "model/block.h"
#include "model/cuda/network_impl.h"

namespace espalier::cuda {

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
    RETURN_IF_ERROR(s.send_inputs({}, start, false));
    ASSIGN_OR_RETURN(int64_t* positions, s.workspace.take<int64_t>(n));
    RETURN_IF_ERROR(fill_positions(s.stream, s.device_start(), 1, n, positions));
    for (int k = 0; k < c.drafter.n_stages; ++k) {
      const Workspace::Mark mark = s.workspace.mark();
      ASSIGN_OR_RETURN(const float* keys, run.make_window_keys(s.weights.stages[static_cast<size_t>(k)].attn, positions, main_x, n));
      RETURN_IF_ERROR(write_ring(s.stream, keys, s.device_start(), n, c.window, c.head_dim, s.rings.data() + k * c.window * c.head_dim));
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
  RETURN_IF_ERROR(s.send_inputs(ids, start, false));
  ASSIGN_OR_RETURN(DeviceRows rows, s.begin_rows(start, n));
  Run run = s.run();
  const int64_t n_before = std::min(start, c.window), n_places = n_before + n;
  for (int k = 0; k < c.drafter.n_stages; ++k) {
    const DeviceBlock& w = s.weights.stages[static_cast<size_t>(k)];
    RETURN_IF_ERROR(run.block(w, c.drafter.n_active, rows, [&](const float* x, float* y) -> Status {
      ASSIGN_OR_RETURN(const float* qr, run.make_reduced_queries(w.attn, x, n));
      ASSIGN_OR_RETURN(const float* q, run.make_full_queries(w.attn, rows.positions, qr, n));
      ASSIGN_OR_RETURN(const float* own, run.make_window_keys(w.attn, rows.positions, x, n));
      ASSIGN_OR_RETURN(const float** keys, s.workspace.take<const float*>(n * n_places));
      ASSIGN_OR_RETURN(int64_t* begin, s.workspace.take<int64_t>(n + 1));
      RETURN_IF_ERROR(make_draft_lists(s.stream, {own, s.rings.data() + k * c.window * c.head_dim, s.device_start(), c.window, c.head_dim}, n_before, n, keys, begin));
      ASSIGN_OR_RETURN(float* o, run.attend(w.attn, q, keys, begin, n_places, n));
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
  ASSIGN_OR_RETURN(const float* logits_there, run.project(s.weights.head, normed, n, Rounding::kNone));
  RETURN_IF_ERROR(s.stream.copy_to_host(result.logits.f32(), logits_there, static_cast<size_t>(n * c.vocab) * sizeof(float)));
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
