#include "model/cuda/run.h"

#include <cmath>

#include "ops/cuda/attention.h"
#include "ops/cuda/rows.h"
#include "ops/cuda/selection.h"
#include "ops/cuda/streams.h"

namespace espalier::cuda {

Status Run::round_if_vendor(float* x, int64_t n) {
  return numerics_ == Numerics::kVendor ? ops::cuda::round_to_bf16(stream_, x, n) : ok_status();
}

Status Run::normalise(const float* x, const float* weight, int64_t d, int64_t n_rows, float* y) {
  RETURN_IF_ERROR(ops::cuda::rms_norm(stream_, {x, weight, y, n_rows, d, config_.rms_norm_eps}));
  return round_if_vendor(y, n_rows * d);
}

Status Run::project(const DeviceWeight& w, const float* x, int64_t x_stride, int64_t n_rows, Rounding rounding, float* y, int64_t y_stride) {
  if (n_rows == 0) return ok_status();
  codec::cuda::RowsProductParams p;
  p.weight = w;
  p.x = x;
  p.x_stride = x_stride;
  p.y = y;
  p.y_stride = y_stride;
  p.n_rows = n_rows;
  if (w.is_exl3) {
    ASSIGN_OR_RETURN(p.rotated, workspace_.take<float>(n_rows * w.in));
  }
  if (numerics_ == Numerics::kVendor && rounding == Rounding::kActQuant) {
    CHECK(x_stride == w.in) << "rounded activations lie together";
    ASSIGN_OR_RETURN(float* quantised, workspace_.take<float>(n_rows * w.in));
    RETURN_IF_ERROR(stream_.copy_on_device(quantised, x, static_cast<size_t>(n_rows * w.in) * sizeof(float)));
    RETURN_IF_ERROR(ops::cuda::fake_quant(stream_, {quantised, n_rows, w.in, ops::FakeQuantFormat::kAct}));
    p.x = quantised;
  }
  RETURN_IF_ERROR(codec::cuda::multiply_rows(stream_, p));
  if (numerics_ != Numerics::kVendor || rounding == Rounding::kNone) return ok_status();
  if (y_stride == w.out) return round_if_vendor(y, n_rows * w.out);
  for (int64_t t = 0; t < n_rows; ++t) RETURN_IF_ERROR(round_if_vendor(y + t * y_stride, w.out));
  return ok_status();
}

Result<float*> Run::project(const DeviceWeight& w, const float* x, int64_t n_rows, Rounding rounding) {
  ASSIGN_OR_RETURN(float* y, workspace_.take<float>(n_rows * w.out));
  RETURN_IF_ERROR(project(w, x, w.in, n_rows, rounding, y, w.out));
  return y;
}

Status Run::rotate(const DeviceAttention& w, const int64_t* positions, int64_t n_rows, int64_t n_heads, int64_t dim, bool is_inverse, float* x) {
  RETURN_IF_ERROR(ops::cuda::rope(stream_, {x, positions, n_rows, n_heads, dim, config_.rope_dim, w.frequencies, is_inverse}));
  return round_if_vendor(x, n_rows * n_heads * dim);
}

Result<Run::Mix> Run::mixes(const DeviceMix& w, const float* h, int64_t n_rows) {
  const int64_t n = config_.n_streams;
  stream_.begin_part("mHC");
  ASSIGN_OR_RETURN(const float* dots, project(w.fn, h, n_rows, Rounding::kNone));
  Mix mix;
  ASSIGN_OR_RETURN(mix.pre, workspace_.take<float>(n_rows * n));
  ASSIGN_OR_RETURN(mix.post, workspace_.take<float>(n_rows * n));
  ASSIGN_OR_RETURN(mix.comb, workspace_.take<float>(n_rows * n * n));
  ops::MhcCoefficientsParams p;
  p.h = h;
  p.dots = dots;
  p.scale = w.scale;
  p.base = w.base;
  p.pre = mix.pre;
  p.post = mix.post;
  p.comb = mix.comb;
  p.n_rows = n_rows;
  p.n_streams = n;
  p.d_model = config_.d_model;
  p.sinkhorn_iters = config_.sinkhorn_iters;
  p.norm_eps = config_.rms_norm_eps;
  p.hc_eps = static_cast<float>(config_.hc_eps);
  RETURN_IF_ERROR(ops::cuda::mhc_coefficients(stream_, p));
  return mix;
}

// Collapses h with the weights of the previous sub-layer, normalises, runs `body`, expands with this sub-layer's own.
Status Run::sub_layer(DeviceRows& rows, const float* collapse_weights, const float* norm, const Mix& mix,
                      const std::function<Status(const float* x, float* y)>& body) {
  const int64_t d = config_.d_model, n = rows.n, n_streams = config_.n_streams;
  stream_.begin_part("collapse, norm");
  ASSIGN_OR_RETURN(float* x, workspace_.take<float>(n * d));
  ASSIGN_OR_RETURN(float* y, workspace_.take<float>(n * d));
  RETURN_IF_ERROR(ops::cuda::mhc_collapse(stream_, {rows.h, collapse_weights, x, n, n_streams, d}));
  RETURN_IF_ERROR(round_if_vendor(x, n * d));
  RETURN_IF_ERROR(normalise(x, norm, d, n, x));
  RETURN_IF_ERROR(body(x, y));
  stream_.begin_part("expand");
  RETURN_IF_ERROR(ops::cuda::mhc_expand(stream_, {y, rows.h, mix.post, mix.comb, rows.next, n, n_streams, d}));
  RETURN_IF_ERROR(round_if_vendor(rows.next, n * n_streams * d));
  std::swap(rows.h, rows.next);
  return ok_status();
}

Status Run::block(const DeviceBlock& w, int64_t n_active, DeviceRows& rows, const std::function<Status(const float* x, float* y)>& attention) {
  const Workspace::Mark start = workspace_.mark();
  ASSIGN_OR_RETURN(const Mix a, mixes(w.hc_attn, rows.h, rows.n));
  const Workspace::Mark attention_start = workspace_.mark();
  RETURN_IF_ERROR(sub_layer(rows, rows.pre, w.attn_norm, a, attention));
  workspace_.reset(attention_start);
  ASSIGN_OR_RETURN(const Mix f, mixes(w.hc_ffn, rows.h, rows.n));
  RETURN_IF_ERROR(sub_layer(rows, a.pre, w.ffn_norm, f, [&](const float* x, float* y) { return moe(w.moe, n_active, x, rows.n, y); }));
  RETURN_IF_ERROR(stream_.copy_on_device(rows.pre, f.pre, static_cast<size_t>(rows.n * config_.n_streams) * sizeof(float)));
  workspace_.reset(start);
  return ok_status();
}

Status Run::collapse(const DeviceRows& rows, int64_t first, float* out) {
  const int64_t n = rows.n - first, d = config_.d_model, n_streams = config_.n_streams;
  RETURN_IF_ERROR(ops::cuda::mhc_collapse(stream_, {rows.h + first * n_streams * d, rows.pre + first * n_streams, out, n, n_streams, d}));
  return round_if_vendor(out, n * d);
}

Status Run::moe(const DeviceMoe& w, int64_t n_active, const float* x, int64_t n_rows, float* y) {
  const int64_t d = config_.d_model, n_slots = n_rows * n_active;
  const float limit = static_cast<float>(config_.swiglu_limit);
  const bool is_vendor = numerics_ == Numerics::kVendor;
  stream_.begin_part("router");
  ASSIGN_OR_RETURN(const float* logits, project(w.gate, x, n_rows, Rounding::kNone));
  ops::RouterParams r;
  r.logits = logits;
  r.bias = w.bias;
  ASSIGN_OR_RETURN(r.scores, workspace_.take<float>(n_rows * w.n_experts));
  ASSIGN_OR_RETURN(r.ids, workspace_.take<int32_t>(n_slots));
  ASSIGN_OR_RETURN(r.weights, workspace_.take<float>(n_slots));
  r.n_rows = n_rows;
  r.n_experts = w.n_experts;
  r.n_active = n_active;
  r.temperature = static_cast<float>(config_.gate_temp);
  r.scale = static_cast<float>(config_.routed_scale);
  RETURN_IF_ERROR(ops::cuda::router(stream_, r));
  codec::cuda::ExpertPlan& plan = plan_;
  plan.n_experts = w.n_experts;
  RETURN_IF_ERROR(codec::cuda::plan_expert_rows(stream_, r.ids, n_slots, plan));

  const float* in = x;  // of all experts: rounded once
  if (is_vendor) {
    ASSIGN_OR_RETURN(float* quantised, workspace_.take<float>(n_rows * d));
    RETURN_IF_ERROR(stream_.copy_on_device(quantised, x, static_cast<size_t>(n_rows * d) * sizeof(float)));
    RETURN_IF_ERROR(ops::cuda::fake_quant(stream_, {quantised, n_rows, d, ops::FakeQuantFormat::kAct}));
    in = quantised;
  }
  stream_.begin_part("experts");
  const int64_t d_ff = w.shared_w1.out;
  codec::cuda::ExpertsProductParams p;
  p.ids = r.ids;
  p.plan = &plan;
  p.n_slots = n_slots;
  p.max_per_expert = n_rows;
  ASSIGN_OR_RETURN(p.rotated, workspace_.take<float>(n_slots * std::max(d, d_ff)));
  ASSIGN_OR_RETURN(float* gate, workspace_.take<float>(n_slots * d_ff));
  ASSIGN_OR_RETURN(float* up, workspace_.take<float>(n_slots * d_ff));
  ASSIGN_OR_RETURN(float* outputs, workspace_.take<float>(n_slots * d));
  p.x = in;
  p.slots_per_row = n_active;
  p.in = d;
  p.out = d_ff;
  p.weights = w.w3;
  p.y = up;
  RETURN_IF_ERROR(codec::cuda::multiply_expert_rows(stream_, p));
  p.weights = w.w1;
  p.y = gate;
  RETURN_IF_ERROR(codec::cuda::multiply_expert_rows(stream_, p));
  RETURN_IF_ERROR(round_if_vendor(up, n_slots * d_ff));
  RETURN_IF_ERROR(round_if_vendor(gate, n_slots * d_ff));
  RETURN_IF_ERROR(ops::cuda::swiglu(stream_, {gate, up, r.weights, gate, n_slots, d_ff, limit}));
  RETURN_IF_ERROR(round_if_vendor(gate, n_slots * d_ff));
  if (is_vendor) RETURN_IF_ERROR(ops::cuda::fake_quant(stream_, {gate, n_slots, d_ff, ops::FakeQuantFormat::kAct}));
  p.x = gate;
  p.slots_per_row = 1;
  p.in = d_ff;
  p.out = d;
  p.weights = w.w2;
  p.y = outputs;
  RETURN_IF_ERROR(codec::cuda::multiply_expert_rows(stream_, p));
  RETURN_IF_ERROR(round_if_vendor(outputs, n_slots * d));

  stream_.begin_part("shared expert");
  ASSIGN_OR_RETURN(const float* shared_up, project(w.shared_w3, x, n_rows, Rounding::kActQuant));
  ASSIGN_OR_RETURN(float* shared_gate, project(w.shared_w1, x, n_rows, Rounding::kActQuant));
  RETURN_IF_ERROR(ops::cuda::swiglu(stream_, {shared_gate, shared_up, nullptr, shared_gate, n_rows, d_ff, limit}));
  RETURN_IF_ERROR(round_if_vendor(shared_gate, n_rows * d_ff));
  ASSIGN_OR_RETURN(const float* shared, project(w.shared_w2, shared_gate, n_rows, Rounding::kActQuant));
  RETURN_IF_ERROR(join_experts(stream_, outputs, shared, n_rows, n_active, d, y));
  return round_if_vendor(y, n_rows * d);
}

}  // namespace espalier::cuda
