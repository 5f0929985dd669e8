#include <algorithm>
#include <filesystem>

#include "bench/exl3_ablation/samples.h"
#include "model/dataset.h"
#include "model/moe.h"
#include "stages/quantize/encode.h"
#include "stages/quantize/stream.h"

namespace espalier::ablation {
namespace {

constexpr int64_t kPriorSample = 4096;

// Inputs of the experts of every layer of the native network for the given rows.
Result<std::vector<MoeInputs>> native_inputs(const CallContext& context, const WeightLoader& loader,
                                             const std::vector<DatasetRow>& rows) {
  SilentProgress progress;
  ASSIGN_OR_RETURN(const GlobalWeights globals, loader.load_globals(context.pool));
  ASSIGN_OR_RETURN(CalibrationStream stream, CalibrationStream::begin(context, globals, rows));
  std::vector<MoeInputs> inputs;
  for (int layer = 0; layer < context.config.n_layers; ++layer) {
    ASSIGN_OR_RETURN(const BlockWeights weights, loader.load_block(context.pool, layer));
    BlockCapture capture({}, false, context.pool);
    RETURN_IF_ERROR(stream.observe_layer(context, weights, layer, &capture, progress));
    capture.finish();
    inputs.push_back(capture.moe());
    RETURN_IF_ERROR(stream.advance_layer(context, weights, layer, progress));
  }
  return inputs;
}

// Hessian of w2's inputs for some tokens; factors null: each counts the same.
Hessian hidden_hessian(const CallContext& context, const ExpertWeights& expert, const MoeInputs& inputs,
                       const std::vector<int32_t>& tokens, const float* factors) {
  const auto n = static_cast<int64_t>(tokens.size());
  std::vector<float> x(static_cast<size_t>(n * inputs.d_model)), z(static_cast<size_t>(n * expert.w2.in()));
  for (int64_t i = 0; i < n; ++i) {
    std::copy_n(inputs.x.data() + tokens[static_cast<size_t>(i)] * inputs.d_model, inputs.d_model,
                x.data() + i * inputs.d_model);
  }
  expert_hidden(context, expert, x.data(), n, nullptr, z.data());
  HessianAccumulator accumulator(expert.w2.in());
  accumulator.add(context.pool, z.data(), n, factors);
  return accumulator.finish(context.pool);
}

struct ExpertHessians {
  std::vector<double> w13, w2;
  double effective_tokens = 0;
};

// Routed rows weighted by g^2, blended with the layer-wide prior when `use_prior`.
ExpertHessians expert_hessians(const CallContext& context, const ExpertWeights& expert, const MoeInputs& inputs, int e,
                               bool use_prior) {
  const ExpertTokens routed = tokens_by_expert(inputs, context.config.n_experts)[static_cast<size_t>(e)];
  std::vector<float> factors;
  for (float g : routed.weights) factors.push_back(routing_scale(g, 2));
  HessianPrior prior, hidden_prior;
  if (use_prior) {
    HessianAccumulator all(inputs.d_model);
    all.add(context.pool, inputs.x.data(), inputs.n_tokens());
    prior = make_prior(all.finish(context.pool));
    const std::vector<int32_t> sample = sample_tokens(inputs.n_tokens(), kPriorSample, 0, "prior");
    hidden_prior = make_prior(hidden_hessian(context, expert, inputs, sample, nullptr));
  }
  HessianAccumulator own(inputs.d_model);
  add_rows(context.pool, inputs, routed.tokens, factors.data(), &own);
  Hessian mine = own.finish(context.pool);
  ExpertHessians h;
  h.effective_tokens = mine.effective_rows();
  h.w13 = blend_with_prior(std::move(mine), prior, static_cast<double>(context.config.d_model) / 4).values;
  h.w2 = blend_with_prior(hidden_hessian(context, expert, inputs, routed.tokens, factors.data()), hidden_prior,
                          static_cast<double>(context.config.d_ff) / 4)
             .values;
  return h;
}

}  // namespace

Result<std::vector<Sample>> expert_samples(const std::string& dir, const std::vector<int>& k2, ThreadPool& pool) {
  ASSIGN_OR_RETURN(const Dataset data, load_dataset(std::filesystem::path(dir) / "data" / "calibration.jsonl"));
  const std::vector<DatasetRow> rows = spread_rows(data.rows, 48);
  std::vector<DatasetRow> fit, other;
  for (size_t i = 0; i < rows.size(); ++i) (i % 2 == 0 ? fit : other).push_back(rows[i]);
  ASSIGN_OR_RETURN(const WeightLoader loader, WeightLoader::open(dir));
  const CallContext context{loader.config(), loader.engram_hashes(), loader.engram_token_map(), Numerics::kKvq, pool,
                            nullptr};
  ASSIGN_OR_RETURN(const std::vector<MoeInputs> fit_inputs, native_inputs(context, loader, fit));
  ASSIGN_OR_RETURN(const std::vector<MoeInputs> other_inputs, native_inputs(context, loader, other));
  std::vector<Sample> samples;
  for (int layer = 0; layer < context.config.n_layers; ++layer) {
    ASSIGN_OR_RETURN(const BlockWeights weights, loader.load_block(pool, layer));
    const int e = (5 * layer + 3) % context.config.n_experts;
    const ExpertWeights& expert = weights.moe.experts[static_cast<size_t>(e)];
    const ExpertHessians h = expert_hessians(context, expert, fit_inputs[static_cast<size_t>(layer)], e, true);
    const ExpertHessians held_out =
        expert_hessians(context, expert, other_inputs[static_cast<size_t>(layer)], e, false);
    const std::string stem = "layers." + std::to_string(layer) + ".ffn.experts." + std::to_string(e);
    for (int width : k2) {
      const auto add = [&](const char* name, const Linear& linear, bool is_w2) {
        Sample s;
        s.group = is_w2 ? "pocket w2" : "pocket w1 w3";
        s.name = stem + name;
        s.inputs = is_w2 ? "" : stem + codec::width_text(width);
        s.k = linear.in();
        s.n = linear.out();
        s.k2 = width;
        s.weight.resize(static_cast<size_t>(s.k * s.n));
        linear.weight_kn(pool, s.weight.data());
        s.hessian = is_w2 ? h.w2 : h.w13;
        s.held_out = is_w2 ? held_out.w2 : held_out.w13;
        s.effective_tokens = h.effective_tokens;
        samples.push_back(std::move(s));
      };
      add(".w1", expert.w1, false);
      add(".w3", expert.w3, false);
      add(".w2", expert.w2, true);
    }
  }
  return samples;
}

}  // namespace espalier::ablation
