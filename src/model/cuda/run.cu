#include "model/cuda/run.h"

#include <cmath>

#include "ops/cuda/native_product.h"
#include "ops/cuda/rows.h"
#include "ops/cuda/selection.h"
#include "ops/cuda/streams.h"

namespace espalier::cuda {

Result<PassTools> PassTools::create(device::Stream& stream, const DeviceWeights& weights, int64_t max_rows) {
  const Config& c = weights.config;
  PassTools tools;
  const int64_t n_active = std::max(c.n_active, c.drafter.n_active);
  ASSIGN_OR_RETURN(tools.plan, codec::cuda::ExpertPlan::create(stream, max_rows * n_active, std::max(c.n_experts, c.drafter.n_experts)));
  ASSIGN_OR_RETURN(tools.branches, device::Branches::create(stream.device(), kBranches));
  ASSIGN_OR_RETURN(tools.mixing, device::Branches::create(stream.device(), 1));
  if (weights.products == Products::kExact || weights.max_in == 0) return Result<PassTools>(std::move(tools));
  ASSIGN_OR_RETURN(tools.main.scratch, codec::cuda::ProductScratch::create(stream, weights.max_in, weights.max_out));
  // Branches do not multiply with the head, the large query projection or those of Engram.
  const int64_t width = std::max({c.d_model, c.d_ff, c.head_dim, c.o_lora_rank, c.q_lora_rank, c.index_n_heads * c.index_head_dim,
                                  c.n_heads / c.o_groups * c.head_dim});
  for (ProductTools& branch : tools.of_branch) {
    ASSIGN_OR_RETURN(branch.scratch, codec::cuda::ProductScratch::create(stream, width, width));
  }
  if (weights.has_tables) {
    ASSIGN_OR_RETURN(tools.experts, codec::cuda::ExpertsScratch::create(stream, c.d_model, c.d_ff));
  }
  RETURN_IF_ERROR(stream.synchronize());  // the scratches are zero before a branch uses them
  return Result<PassTools>(std::move(tools));
}

Status Run::round_if_vendor(float* x, int64_t n) {
  return numerics_ == Numerics::kVendor ? ops::cuda::round_to_bf16(stream_, x, n) : ok_status();
}

Status Run::normalise(const float* x, const float* weight, int64_t d, int64_t n_rows, float* y) {
  RETURN_IF_ERROR(ops::cuda::rms_norm(stream_, {x, weight, y, n_rows, d, config_.rms_norm_eps}, order_));
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
  if (numerics_ == Numerics::kVendor && rounding == Rounding::kActQuant) {
    CHECK(x_stride == w.in) << "rounded activations lie together";
    ASSIGN_OR_RETURN(float* quantised, workspace_.take<float>(n_rows * w.in));
    RETURN_IF_ERROR(stream_.copy_on_device(quantised, x, static_cast<size_t>(n_rows * w.in) * sizeof(float)));
    RETURN_IF_ERROR(ops::cuda::fake_quant(stream_, {quantised, n_rows, w.in, ops::FakeQuantFormat::kAct}));
    p.x = quantised;
  }
  if (is_in_integers(w)) {
    CHECK(p.x_stride == w.in && y_stride == w.out) << "rows lie together";
    RETURN_IF_ERROR(integer_product(w, p.x, n_rows, y));
  } else if (order_ == ops::cuda::Order::kFast && !w.is_exl3 && ops::cuda::can_multiply_fast(w.native, p.x, p.x_stride)) {
    RETURN_IF_ERROR(ops::cuda::multiply_native_fast(stream_, {w.native, p.x, p.x_stride, y, y_stride, n_rows}));
  } else {
    if (w.is_exl3) {
      ASSIGN_OR_RETURN(p.rotated, workspace_.take<float>(n_rows * w.in));
    }
    RETURN_IF_ERROR(codec::cuda::multiply_rows(stream_, p));
  }
  if (numerics_ != Numerics::kVendor || rounding == Rounding::kNone) return ok_status();
  if (y_stride == w.out) return round_if_vendor(y, n_rows * w.out);
  for (int64_t t = 0; t < n_rows; ++t) RETURN_IF_ERROR(round_if_vendor(y + t * y_stride, w.out));
  return ok_status();
}

Status Run::integer_product(const DeviceWeight& w, const float* x, int64_t n_rows, float* y) {
  for (int64_t first = 0; first < n_rows; first += codec::cuda::kMaxProductRows) {
    const int64_t n = std::min<int64_t>(codec::cuda::kMaxProductRows, n_rows - first);
    RETURN_IF_ERROR(codec::cuda::multiply(stream_, w.exl3, x + first * w.in, n, y + first * w.out, *product_->scratch));
  }
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

Result<Run::Mix> Run::mixes(const DeviceMix& w, const float* h, int64_t n_rows, float* pre) {
  const int64_t n = config_.n_streams;
  stream_.begin_part("mHC");
  ASSIGN_OR_RETURN(float* dots, workspace_.take<float>(n_rows * w.fn.out));
  Mix mix;
  mix.pre = pre;
  ASSIGN_OR_RETURN(mix.post, workspace_.take<float>(n_rows * n));
  ASSIGN_OR_RETURN(mix.comb, workspace_.take<float>(n_rows * n * n));
  RETURN_IF_ERROR(tools_.mixing.fork(stream_, 1));
  if (is_in_integers(w.fn)) {  // uses the main stream's memory for products
    RETURN_IF_ERROR(project(w.fn, h, w.fn.in, n_rows, Rounding::kNone, dots, w.fn.out));
    RETURN_IF_ERROR(tools_.mixing.fork(stream_, 1));
  } else {
    Run beside(weights_, numerics_, tools_.mixing.stream(0), workspace_, tools_);
    RETURN_IF_ERROR(beside.project(w.fn, h, w.fn.in, n_rows, Rounding::kNone, dots, w.fn.out));
  }
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
  RETURN_IF_ERROR(ops::cuda::mhc_coefficients(tools_.mixing.stream(0), p, order_));
  return mix;
}

// Collapses h with the weights of the previous sub-layer, normalises, runs `body`, expands with this sub-layer's own.
Status Run::sub_layer(DeviceRows& rows, const float* collapse_weights, const float* norm, const Mix& mix,
                      const std::function<Status(const float* x, float* y)>& body) {
  const int64_t d = config_.d_model, n = rows.n, n_streams = config_.n_streams;
  stream_.begin_part("collapse, norm");
  ASSIGN_OR_RETURN(float* x, workspace_.take<float>(n * d));
  ASSIGN_OR_RETURN(float* y, workspace_.take<float>(n * d));
  if (numerics_ == Numerics::kVendor) {
    RETURN_IF_ERROR(ops::cuda::mhc_collapse(stream_, {rows.h, collapse_weights, x, n, n_streams, d}));
    RETURN_IF_ERROR(round_if_vendor(x, n * d));
    RETURN_IF_ERROR(normalise(x, norm, d, n, x));
  } else {
    RETURN_IF_ERROR(ops::cuda::mhc_collapse_normalised(stream_, {rows.h, collapse_weights, x, n, n_streams, d}, norm, config_.rms_norm_eps, order_));
  }
  RETURN_IF_ERROR(body(x, y));
  stream_.begin_part("expand");
  RETURN_IF_ERROR(tools_.mixing.join(0, stream_));
  RETURN_IF_ERROR(ops::cuda::mhc_expand(stream_, {y, rows.h, mix.post, mix.comb, rows.next, n, n_streams, d}));
  RETURN_IF_ERROR(round_if_vendor(rows.next, n * n_streams * d));
  std::swap(rows.h, rows.next);
  return ok_status();
}

Status Run::block(const DeviceBlock& w, int64_t n_active, DeviceRows& rows, const std::function<Status(const float* x, float* y)>& attention) {
  const Workspace::Mark start = workspace_.mark();
  ASSIGN_OR_RETURN(float* pre, workspace_.take<float>(rows.n * config_.n_streams));
  ASSIGN_OR_RETURN(const Mix a, mixes(w.hc_attn, rows.h, rows.n, pre));
  const Workspace::Mark attention_start = workspace_.mark();
  RETURN_IF_ERROR(sub_layer(rows, rows.pre, w.attn_norm, a, attention));
  workspace_.reset(attention_start);
  // The next block collapses with this sub-layer's coefficients; those of the block before have been used.
  ASSIGN_OR_RETURN(const Mix f, mixes(w.hc_ffn, rows.h, rows.n, rows.pre));
  RETURN_IF_ERROR(sub_layer(rows, a.pre, w.ffn_norm, f, [&](const float* x, float* y) { return moe(w.moe, n_active, x, rows.n, y); }));
  workspace_.reset(start);
  return ok_status();
}

Status Run::collapse(const DeviceRows& rows, int64_t first, float* out) {
  const int64_t n = rows.n - first, d = config_.d_model, n_streams = config_.n_streams;
  RETURN_IF_ERROR(ops::cuda::mhc_collapse(stream_, {rows.h + first * n_streams * d, rows.pre + first * n_streams, out, n, n_streams, d}));
  return round_if_vendor(out, n * d);
}

Status Run::routed_experts(const DeviceMoe& w, int64_t n_active, const float* x, const int32_t* ids, const float* weights, int64_t n_rows,
                           float* outputs) {
  const int64_t d = config_.d_model, d_ff = w.shared_w1.out, n_slots = n_rows * n_active;
  const bool is_vendor = numerics_ == Numerics::kVendor;
  codec::cuda::ExpertPlan& plan = tools_.plan;
  plan.n_experts = w.n_experts;
  RETURN_IF_ERROR(codec::cuda::plan_expert_rows(stream_, ids, n_slots, plan));

  const float* in = x;  // of all experts: rounded once
  if (is_vendor) {
    ASSIGN_OR_RETURN(float* quantised, workspace_.take<float>(n_rows * d));
    RETURN_IF_ERROR(stream_.copy_on_device(quantised, x, static_cast<size_t>(n_rows * d) * sizeof(float)));
    RETURN_IF_ERROR(ops::cuda::fake_quant(stream_, {quantised, n_rows, d, ops::FakeQuantFormat::kAct}));
    in = quantised;
  }
  codec::cuda::ExpertsProductParams p;
  p.ids = ids;
  p.plan = &plan;
  p.n_slots = n_slots;
  p.max_per_expert = n_rows;
  ASSIGN_OR_RETURN(p.rotated, workspace_.take<float>(n_slots * std::max(d, d_ff)));
  ASSIGN_OR_RETURN(float* gate, workspace_.take<float>(n_slots * d_ff));
  ASSIGN_OR_RETURN(float* up, workspace_.take<float>(n_slots * d_ff));
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
  RETURN_IF_ERROR(ops::cuda::swiglu(stream_, {gate, up, weights, gate, n_slots, d_ff, static_cast<float>(config_.swiglu_limit)}));
  RETURN_IF_ERROR(round_if_vendor(gate, n_slots * d_ff));
  if (is_vendor) RETURN_IF_ERROR(ops::cuda::fake_quant(stream_, {gate, n_slots, d_ff, ops::FakeQuantFormat::kAct}));
  p.x = gate;
  p.slots_per_row = 1;
  p.in = d_ff;
  p.out = d;
  p.weights = w.w2;
  p.y = outputs;
  RETURN_IF_ERROR(codec::cuda::multiply_expert_rows(stream_, p));
  return round_if_vendor(outputs, n_slots * d);
}

Status Run::shared_expert(const DeviceMoe& w, const float* x, int64_t n_rows, float** y) {
  const int64_t d_ff = w.shared_w1.out;
  ASSIGN_OR_RETURN(const float* up, project(w.shared_w3, x, n_rows, Rounding::kActQuant));
  ASSIGN_OR_RETURN(float* gate, project(w.shared_w1, x, n_rows, Rounding::kActQuant));
  RETURN_IF_ERROR(ops::cuda::swiglu(stream_, {gate, up, nullptr, gate, n_rows, d_ff, static_cast<float>(config_.swiglu_limit)}));
  RETURN_IF_ERROR(round_if_vendor(gate, n_rows * d_ff));
  ASSIGN_OR_RETURN(*y, project(w.shared_w2, gate, n_rows, Rounding::kActQuant));
  return ok_status();
}

Status Run::integer_experts(const DeviceMoe& w, const codec::cuda::ExpertsParams& p) {
  RETURN_IF_ERROR(codec::cuda::plan_experts(stream_, *w.table, p, *tools_.experts));
  return codec::cuda::run_experts(stream_, *w.table, p, *tools_.experts);
}

// More slots than one call takes: in the order of their experts, so that a call needs few of them, each slot as a token of its own.
Status Run::many_integer_experts(const DeviceMoe& w, const codec::cuda::ExpertsParams& all, const int32_t** place) {
  const int64_t d = config_.d_model;
  SlotOrder order;
  order.n_slots = all.n_tokens * all.n_active;
  order.n_active = all.n_active;
  order.d = d;
  order.x = all.x;
  order.ids = all.ids;
  order.weights = all.weights;
  tools_.plan.n_experts = w.n_experts;
  RETURN_IF_ERROR(codec::cuda::plan_expert_rows(stream_, all.ids, order.n_slots, tools_.plan));
  order.order = tools_.plan.order.data();
  ASSIGN_OR_RETURN(order.x_to, workspace_.take<float>(order.n_slots * d));
  ASSIGN_OR_RETURN(order.ids_to, workspace_.take<int32_t>(order.n_slots));
  ASSIGN_OR_RETURN(order.weights_to, workspace_.take<float>(order.n_slots));
  ASSIGN_OR_RETURN(order.place, workspace_.take<int32_t>(order.n_slots));
  RETURN_IF_ERROR(order_slots(stream_, order));
  for (int64_t first = 0; first < order.n_slots; first += codec::cuda::kMaxSlots) {
    const int64_t n = std::min<int64_t>(codec::cuda::kMaxSlots, order.n_slots - first);
    RETURN_IF_ERROR(integer_experts(w, {order.x_to + first * d, order.ids_to + first, order.weights_to + first, all.y + first * d, n, 1, all.limit}));
  }
  *place = order.place;
  return ok_status();
}

Status Run::moe(const DeviceMoe& w, int64_t n_active, const float* x, int64_t n_rows, float* y) {
  const int64_t d = config_.d_model, n_slots = n_rows * n_active;
  const float limit = static_cast<float>(config_.swiglu_limit);
  const bool is_vendor = numerics_ == Numerics::kVendor;
  // The shared expert beside everything else.
  RETURN_IF_ERROR(tools_.branches.fork(stream_, 1));
  float* shared = nullptr;
  RETURN_IF_ERROR(on_branch(0).shared_expert(w, x, n_rows, &shared));
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
  stream_.begin_part("experts");
  ASSIGN_OR_RETURN(float* routed, workspace_.take<float>(n_slots * d));
  const int32_t* place = nullptr;
  int64_t n_outputs = n_active;  // of a row
  if (w.table == nullptr || is_vendor) {
    RETURN_IF_ERROR(routed_experts(w, n_active, x, r.ids, r.weights, n_rows, routed));
  } else if (n_slots <= codec::cuda::kMaxSlots) {
    n_outputs = 1;  // added up already
    RETURN_IF_ERROR(integer_experts(w, {x, r.ids, r.weights, routed, n_rows, n_active, limit}));
  } else {
    RETURN_IF_ERROR(many_integer_experts(w, {x, r.ids, r.weights, routed, n_rows, n_active, limit}, &place));
  }
  stream_.begin_part("experts join");
  RETURN_IF_ERROR(tools_.branches.join(0, stream_));
  RETURN_IF_ERROR(join_experts(stream_, routed, place, shared, n_rows, n_outputs, d, y));
  return round_if_vendor(y, n_rows * d);
}

}  // namespace espalier::cuda
