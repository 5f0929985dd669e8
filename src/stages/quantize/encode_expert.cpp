#include "stages/quantize/encode_expert.h"

#include <algorithm>

#include "model/moe.h"
#include "stages/quantize/output_metrics.h"

namespace espalier {

Status check_dropped(const Hessian& hessian, const std::string& stem) {
  if (hessian.dropped * 10 <= hessian.rows + hessian.dropped) return ok_status();
  return data_loss("calibration of '" + stem + "': " + std::to_string(hessian.dropped) + " of " +
                   std::to_string(hessian.rows + hessian.dropped) +
                   " input rows are not finite; is the checkpoint damaged?");
}

namespace {

Hessian hidden_hessian(const ExpertsJob& experts, const ExpertWeights& expert, const std::vector<int32_t>& tokens,
                       const float* scale, ThreadPool& pool) {
  const int64_t d_ff = expert.w2.in();
  const int64_t d = experts.inputs.d_model;
  CallContext context = experts.job.context;
  context.observer = nullptr;
  HessianAccumulator accumulator(d_ff);
  std::vector<float> x;
  std::vector<float> z;
  const auto n = static_cast<int64_t>(tokens.size());
  for (int64_t begin = 0; begin < n; begin += HessianAccumulator::kChunkRows) {
    const int64_t rows = std::min(HessianAccumulator::kChunkRows, n - begin);
    x.resize(static_cast<size_t>(rows * d));
    z.resize(static_cast<size_t>(rows * d_ff));
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(experts.inputs.x.data() + static_cast<int64_t>(tokens[static_cast<size_t>(begin + r)]) * d, d,
                  x.data() + r * d);
    }
    expert_hidden(context, expert, x.data(), rows, nullptr, z.data());
    accumulator.add(pool, z.data(), rows, scale == nullptr ? nullptr : scale + begin);
  }
  return accumulator.finish(pool);
}

}  // namespace

Status encode_expert(const ExpertsJob& experts, const ExpertSpecs& at, int e, ExpertWeights& expert,
                     std::vector<MatrixRecord>& records) {
  const BlockJob& job = experts.job;
  ThreadPool& pool = job.context.pool;
  const ExpertTokens& routed = experts.routed[static_cast<size_t>(e)];
  if (at.w1 < 0 || at.w3 < 0 || at.w2 < 0) return ok_status();
  std::vector<float> scale;
  for (float g : routed.weights) scale.push_back(routing_scale(g, job.settings.routing_exponent));

  HessianAccumulator accumulator(experts.inputs.d_model);
  add_rows(pool, experts.inputs, routed.tokens, scale.data(), &accumulator);
  Hessian own = accumulator.finish(pool);
  RETURN_IF_ERROR(check_dropped(own, job.prefix + "ffn.experts." + std::to_string(e)));
  MatrixRecord facts;
  describe_hessian(own, &facts);
  const BlendedHessian blended = blend_with_prior(std::move(own), experts.prior_w13, experts.n0_w13);
  facts.prior_fraction = blended.prior_fraction;

  // What w2 sees: the hidden rows of the native or of the just-encoded w1 and w3.
  Hessian hidden;
  Hessian hidden_sample;
  const auto run_hidden = [&] {
    hidden = hidden_hessian(experts, expert, routed.tokens, scale.data(), pool);
    hidden_sample = hidden_hessian(experts, expert, experts.sample, nullptr, pool);
  };
  if (job.settings.w2_input == W2Input::kNative) run_hidden();
  const auto target = [&](int index, Linear* linear) {
    const auto i = static_cast<size_t>(index);
    return EncodeTarget{job.specs[i], job.k2[i], linear, &records[i]};
  };
  records[static_cast<size_t>(at.w1)] = facts;
  records[static_cast<size_t>(at.w3)] = facts;
  const std::vector<EncodeTarget> gate_and_up = {target(at.w1, &expert.w1), target(at.w3, &expert.w3)};
  if (job.settings.shared_scales && gate_and_up[0].k2 == gate_and_up[1].k2) {
    RETURN_IF_ERROR(encode_sharing(job.settings, gate_and_up, blended.values.data(), pool));
  } else {
    GateUpMetrics metrics;
    if (job.settings.output_metrics)
      metrics = gate_up_metrics(job.context, experts.inputs, expert, routed.tokens, scale.data());
    const auto output = [](const std::vector<double>& m) {
      return codec::OutputMetric{m.empty() ? nullptr : m.data(), nullptr};
    };
    RETURN_IF_ERROR(encode_matrix(job.settings, gate_and_up[0], blended.values.data(), output(metrics.w1), pool));
    RETURN_IF_ERROR(encode_matrix(job.settings, gate_and_up[1], blended.values.data(), output(metrics.w3), pool));
  }
  if (job.settings.w2_input == W2Input::kQuantized) run_hidden();

  RETURN_IF_ERROR(check_dropped(hidden, job.prefix + "ffn.experts." + std::to_string(e) + ".w2"));
  MatrixRecord& record = records[static_cast<size_t>(at.w2)];
  describe_hessian(hidden, &record);
  const BlendedHessian blended_hidden = blend_with_prior(std::move(hidden), make_prior(hidden_sample), experts.n0_w2);
  record.prior_fraction = blended_hidden.prior_fraction;
  return encode_matrix(job.settings, target(at.w2, &expert.w2), blended_hidden.values.data(),
                       {nullptr, job.residual_metric}, pool);
}

}  // namespace espalier
