// One call in flight on a GPU: the blocks of the network as sequences of operations on one stream. The steps, their order and their
// bits are those of model/block.cpp, attention.cpp, compression.cpp and moe.cpp; with products in integers the steps are the same, sums
// have an order of their own (ops/cuda/order.h). Internal to model/cuda.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "base/status.h"
#include "codec/cuda/experts.h"
#include "codec/cuda/product.h"
#include "device/branch.h"
#include "device/stream.h"
#include "model/cuda/device_weights.h"
#include "model/cuda/sequence_cache.h"
#include "model/cuda/steps.h"
#include "model/cuda/workspace.h"
#include "model/numerics.h"
#include "model/project.h"
#include "ops/cuda/order.h"

namespace espalier::cuda {

// Rows of one sequence on their way through the network; device memory of the workspace.
struct DeviceRows {
  const int64_t* start = nullptr;  // position of the first one
  int64_t phase = 0;               // start modulo every compress ratio
  bool is_first = false;           // start is 0; asked in vendor numerics only
  int64_t n = 0;
  float* h = nullptr;     // [n, HC, D]
  float* next = nullptr;  // the same, where a sub-layer writes
  float* pre = nullptr;   // [n, HC]
  int64_t* positions = nullptr;  // [n] start + t
  // Of the last index source that ran.
  int32_t* selected = nullptr;      // [n, selected_stride]
  int64_t* n_selected = nullptr;    // [n]
  int64_t selected_stride = 0;
  // Of the candidate source.
  uint8_t* candidates = nullptr;  // [n, n_candidate_blocks]
  int64_t n_candidate_blocks = 0;
};

// What the products of one stream share; products in integers only.
struct ProductTools {
  std::optional<codec::cuda::ProductScratch> scratch;
};

// What the passes of a sequence share: the products' memory of the main stream and of every branch.
struct PassTools {
  static constexpr int kBranches = 3;
  static Result<PassTools> create(device::Stream& stream, const DeviceWeights& weights, int64_t max_rows);

  codec::cuda::ExpertPlan plan;
  std::optional<codec::cuda::ExpertsScratch> experts;  // products in integers only
  ProductTools main;
  ProductTools of_branch[kBranches];
  device::Branches branches;
  device::Branches mixing;  // one more, for the coefficients of a sub-layer, beside all of it
};

class Run {
 public:
  Run(const DeviceWeights& weights, Numerics numerics, device::Stream& stream, Workspace& workspace, PassTools& tools)
      : weights_(weights), config_(weights.config), numerics_(numerics), order_(weights.products == Products::kExact ? ops::cuda::Order::kCpu : ops::cuda::Order::kFast),
        stream_(stream), workspace_(workspace), tools_(tools), product_(&tools.main) {}

  // y [n_rows, out] (rows y_stride apart) = x * W with the numerics' rounding points, as model/project.h.
  Status project(const DeviceWeight& w, const float* x, int64_t x_stride, int64_t n_rows, Rounding rounding, float* y, int64_t y_stride);
  // The same into new memory.
  Result<float*> project(const DeviceWeight& w, const float* x, int64_t n_rows, Rounding rounding);
  Status normalise(const float* x, const float* weight, int64_t d, int64_t n_rows, float* y);
  Status round_if_vendor(float* x, int64_t n);
  Status rotate(const DeviceAttention& w, const int64_t* positions, int64_t n_rows, int64_t n_heads, int64_t dim, bool is_inverse, float* x);

  // Both sub-layers of a block; attention(x, y) queues the block's own.
  Status block(const DeviceBlock& w, int64_t n_active, DeviceRows& rows, const std::function<Status(const float* x, float* y)>& attention);
  Status moe(const DeviceMoe& w, int64_t n_active, const float* x, int64_t n_rows, float* y);
  // Final collapse of rows from `first` on: out [n - first, D].
  Status collapse(const DeviceRows& rows, int64_t first, float* out);
  Status shared_expert(const DeviceMoe& w, const float* x, int64_t n_rows, float** y);

  // qr [n_rows, q_lora_rank], and q [n_rows, n_heads, head_dim] of it.
  Result<float*> make_reduced_queries(const DeviceAttention& w, const float* x, int64_t n_rows);
  Result<float*> make_full_queries(const DeviceAttention& w, const int64_t* positions, const float* qr, int64_t n_rows);
  Result<float*> make_window_keys(const DeviceAttention& w, const int64_t* positions, const float* x, int64_t n_rows);
  // o [n_rows, n_heads, head_dim] of lists with n_places places each.
  Result<float*> attend(const DeviceAttention& w, const float* q, const float* const* keys, const int64_t* begin, int64_t n_places,
                        int64_t n_rows);
  Status project_output(const DeviceAttention& w, const int64_t* positions, float* o, int64_t n_rows, float* y);

  // A backbone layer's attention with its caches.
  Status layer_attention(const DeviceAttention& w, int layer, SequenceCache& cache, DeviceRows& rows, const float* x, float* y);

  device::Stream& stream() { return stream_; }
  Workspace& workspace() { return workspace_; }
  Numerics numerics() const { return numerics_; }
  ops::cuda::Order order() const { return order_; }
  const Config& config() const { return config_; }

 private:
  struct Mix {
    float *pre, *post, *comb;
  };
  // Group g of wo_a: rows at x + g * x_group, x_stride apart, to y + g * y_group.
  Status project_groups(const DeviceAttention& w, const float* x, int64_t x_group, int64_t x_stride, int64_t n_rows, float* y, int64_t y_group,
                        int64_t y_stride);
  // pre: where those coefficients go. Queued on tools.mixing: nobody needs them before the sub-layer's end, where sub_layer joins it.
  Result<Mix> mixes(const DeviceMix& w, const float* h, int64_t n_rows, float* pre);
  Status sub_layer(DeviceRows& rows, const float* collapse_weights, const float* norm, const Mix& mix,
                   const std::function<Status(const float* x, float* y)>& body);
  Status compress(const DeviceAttention& w, int layer, SequenceCache& cache, const DeviceRows& rows, const float* x);
  Result<float*> make_latents(const DeviceCompressor& w, int64_t ratio, CompressedRows& cache, const DeviceRows& rows, const float* x,
                              int64_t n_new);
  // What the scores need beside the index queries.
  struct IndexInputs {
    float* weights;      // [n, index heads]
    int64_t* n_visible;  // [n] entries of the source
    int64_t* begin;      // [n] where scores begin
  };
  Result<IndexInputs> index_inputs(const DeviceAttention& w, int layer, const SequenceCache& cache, const DeviceRows& rows, const float* x);
  Status select_entries(const DeviceAttention& w, int layer, SequenceCache& cache, DeviceRows& rows, const float* qr, const IndexInputs& inputs);

  // Queues on a branch; fork and join are the caller's. A branch's memory comes from the same workspace, so that the join must come before
  // the workspace is reset.
  Run on_branch(int i) {
    Run run(weights_, numerics_, tools_.branches.stream(i), workspace_, tools_);
    run.product_ = &tools_.of_branch[i];
    return run;
  }
  Status integer_product(const DeviceWeight& w, const float* x, int64_t n_rows, float* y);
  // outputs [n_rows, n_active, d]: the weighted ones of the experts that the router chose.
  Status routed_experts(const DeviceMoe& w, int64_t n_active, const float* x, const int32_t* ids, const float* weights, int64_t n_rows,
                        float* outputs);
  // p.y: the sums of the tokens.
  Status integer_experts(const DeviceMoe& w, const codec::cuda::ExpertsParams& p);
  // p.y [n_slots, d]: the weighted outputs, that of slot s at *place[s].
  Status many_integer_experts(const DeviceMoe& w, const codec::cuda::ExpertsParams& p, const int32_t** place);
  bool is_in_integers(const DeviceWeight& w) const {
    return order_ == ops::cuda::Order::kFast && w.is_exl3 && w.exl3.codebook == codec::Codebook::kMul1;
  }

  const DeviceWeights& weights_;
  const Config& config_;
  const Numerics numerics_;
  const ops::cuda::Order order_;
  device::Stream& stream_;
  Workspace& workspace_;
  PassTools& tools_;
  ProductTools* product_;
};

}  // namespace espalier::cuda
