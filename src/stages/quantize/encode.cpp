#include "stages/quantize/encode.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/hash.h"
#include "base/rng.h"
#include "model/moe.h"
#include "ops/scalar_math.h"
#include "stages/quantize/output_metrics.h"

namespace espalier {
namespace {

constexpr int64_t kSmallMatrix = int64_t{1} << 20;  // below this, experts run side by side instead of cutting one up

std::span<const uint8_t> bytes_of(const std::vector<uint16_t>& words) {
  return {reinterpret_cast<const uint8_t*>(words.data()), words.size() * sizeof(uint16_t)};
}

bool is_routed(const MatrixSpec& spec) {
  return spec.expert >= 0;
}

}  // namespace

Linear* find_linear(BlockWeights& weights, const MatrixSpec& spec) {
  AttentionWeights& attn = weights.attn;
  ExpertWeights* expert = spec.expert >= 0 ? &weights.moe.experts.at(static_cast<size_t>(spec.expert)) : nullptr;
  switch (spec.kind) {
    case MatrixKind::kWqA:
      return &attn.wq_a;
    case MatrixKind::kWqB:
      return &attn.wq_b;
    case MatrixKind::kWkv:
      return &attn.wkv;
    case MatrixKind::kWoA:
      return &attn.wo_a.at(static_cast<size_t>(spec.group));
    case MatrixKind::kWoB:
      return &attn.wo_b;
    case MatrixKind::kCompressorWkv:
      return &attn.compressor.value().wkv;
    case MatrixKind::kCompressorWgate:
      return &attn.compressor.value().wgate;
    case MatrixKind::kIndexerWqB:
      return &attn.indexer.value().wq_b;
    case MatrixKind::kIndexerWk:
      return &attn.indexer.value().wk;
    case MatrixKind::kExpertW1:
      return &expert->w1;
    case MatrixKind::kExpertW3:
      return &expert->w3;
    case MatrixKind::kExpertW2:
      return &expert->w2;
    case MatrixKind::kSharedW1:
      return &weights.moe.shared.w1;
    case MatrixKind::kSharedW3:
      return &weights.moe.shared.w3;
    case MatrixKind::kSharedW2:
      return &weights.moe.shared.w2;
    case MatrixKind::kEngramWkv:
      return &weights.engram.value().wkv;
    case MatrixKind::kHead:
    case MatrixKind::kMainProj:
      return nullptr;
  }
  return nullptr;
}

std::string tensor_digest(const codec::Exl3Tensor& tensor) {
  Sha256 digest;
  digest.update(bytes_of(tensor.trellis));
  digest.update(bytes_of(tensor.suh));
  digest.update(bytes_of(tensor.svh));
  return digest.finish_hex();
}

float routing_scale(float weight, double exponent) {
  if (exponent == 0) return 1.0f;
  if (exponent == 2) return weight;
  if (weight <= 0) return 0.0f;
  return static_cast<float>(ops::pow_d(static_cast<double>(weight), exponent / 2));
}

std::vector<int32_t> sample_tokens(int64_t n, int64_t count, uint64_t seed, const std::string& name) {
  std::vector<int32_t> out;
  if (count >= n) {
    for (int64_t t = 0; t < n; ++t) out.push_back(static_cast<int32_t>(t));
    return out;
  }
  const CounterRng rng(seed, name);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = i * n / count;
    const int64_t end = (i + 1) * n / count;
    out.push_back(static_cast<int32_t>(
        begin + static_cast<int64_t>(rng.uniform(static_cast<uint64_t>(i)) * static_cast<double>(end - begin))));
  }
  return out;
}

void add_rows(ThreadPool& pool, const MoeInputs& inputs, const std::vector<int32_t>& tokens, const float* scale,
              HessianAccumulator* accumulator) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    accumulator->add(pool, inputs.x.data() + static_cast<int64_t>(tokens[i]) * inputs.d_model, 1,
                     scale == nullptr ? nullptr : scale + i);
  }
}

namespace {

std::vector<float> native_weight(const EncodeTarget& target, ThreadPool& pool) {
  std::vector<float> weight(static_cast<size_t>(target.spec.in * target.spec.out));
  target.linear->weight_kn(pool, weight.data());
  return weight;
}

codec::QuantizeOptions codec_options(const EncodeSettings& settings, const EncodeTarget& target) {
  codec::QuantizeOptions options = settings.codec;
  options.k2 = target.k2;
  options.name = target.spec.stem;
  options.damping = settings.damping.value_or(default_damping(target.record->effective_tokens, target.spec.in));
  return options;
}

void take(codec::QuantizedMatrix q, const EncodeTarget& target) {
  MatrixRecord& record = *target.record;
  record.stem = target.spec.stem;
  record.in = target.spec.in;
  record.out = target.spec.out;
  record.k2 = target.k2;
  record.hessian = std::string(codec::hessian_use_name(q.hessian));
  record.damping = q.damping;
  record.true_error = q.true_error;
  record.relative_mse = q.relative_mse;
  record.weighted_error = q.weighted_error;
  record.fallbacks = std::move(q.fallbacks);
  if (record.tokens == 0 && q.hessian == codec::HessianUse::kCalibrated) {
    record.fallbacks.push_back({"no calibration tokens: the layer's prior alone"});
  }
  record.sha256 = tensor_digest(q.tensor);
  *target.linear = Linear::from_exl3(std::move(q.tensor), WeightResidency::kUnpacked);
}

}  // namespace

Status encode_matrix(const EncodeSettings& settings, const EncodeTarget& target, const double* hessian,
                     const codec::OutputMetric& output, ThreadPool& pool) {
  const std::vector<float> weight = native_weight(target, pool);
  codec::QuantizeOptions options = codec_options(settings, target);
  options.output = output;
  if (output.diagonal != nullptr || output.full != nullptr) options.output_damping = kOutputMetricDamping;
  ASSIGN_OR_RETURN(codec::QuantizedMatrix q, codec::quantize_matrix(weight.data(), target.spec.in, target.spec.out,
                                                                    hessian, options, pool));
  take(std::move(q), target);
  return ok_status();
}

Status encode_sharing(const EncodeSettings& settings, const std::vector<EncodeTarget>& targets, const double* hessian,
                      ThreadPool& pool) {
  std::vector<std::vector<float>> weights;
  std::vector<codec::SharedInputMatrix> matrices;
  for (const EncodeTarget& target : targets) {
    CHECK(target.k2 == targets[0].k2 && target.spec.in == targets[0].spec.in) << target.spec.stem;
    weights.push_back(native_weight(target, pool));
    matrices.push_back({weights.back().data(), target.spec.out, target.spec.stem});
  }
  ASSIGN_OR_RETURN(std::vector<codec::QuantizedMatrix> made,
                   codec::quantize_with_shared_inputs(matrices, targets[0].spec.in, hessian,
                                                      codec_options(settings, targets[0]), pool));
  for (size_t i = 0; i < targets.size(); ++i) take(std::move(made[i]), targets[i]);
  return ok_status();
}

void describe_hessian(const Hessian& hessian, MatrixRecord* record) {
  record->tokens = hessian.rows;
  record->dropped_tokens = hessian.dropped;
  record->effective_tokens = hessian.effective_rows();
  record->weight_sum = hessian.weight_sum;
  if (hessian.sum.empty() || hessian.weight_sum <= 0) return;
  record->diagonal_min = hessian.sum[0] / hessian.weight_sum;
  for (int64_t i = 0; i < hessian.k; ++i) {
    const double d = hessian.sum[static_cast<size_t>(i * hessian.k + i)] / hessian.weight_sum;
    record->diagonal_mean += d / static_cast<double>(hessian.k);
    record->diagonal_min = std::min(record->diagonal_min, d);
    record->diagonal_max = std::max(record->diagonal_max, d);
  }
}

namespace {

Status check_dropped(const Hessian& hessian, const std::string& stem) {
  if (hessian.dropped * 10 <= hessian.rows + hessian.dropped) return ok_status();
  return data_loss("calibration of '" + stem + "': " + std::to_string(hessian.dropped) + " of " +
                   std::to_string(hessian.rows + hessian.dropped) +
                   " input rows are not finite; is the checkpoint damaged?");
}

// Everything that the experts of a block share.
struct ExpertsJob {
  const BlockJob& job;
  const MoeInputs& inputs;
  std::vector<ExpertTokens> routed;
  HessianPrior prior_w13;
  double n0_w13 = 0;
  double n0_w2 = 0;
  std::vector<int32_t> sample;  // tokens for w2's prior
};

// Spec indices of one expert; -1: not in the job. Its three matrices have the same two dimensions, so all or none are
// quantizable.
struct ExpertSpecs {
  int w1 = -1, w3 = -1, w2 = -1;
};

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

Status encode_experts(const BlockJob& job, const BlockCapture& capture, BlockWeights& weights,
                      std::vector<MatrixRecord>& records, BlockCoverage* coverage, Progress& progress) {
  std::vector<ExpertSpecs> specs(static_cast<size_t>(job.n_experts));
  bool any = false;
  int64_t size = 0;
  for (size_t i = 0; i < job.specs.size(); ++i) {
    const MatrixSpec& spec = job.specs[i];
    if (!is_routed(spec) || !spec.is_quantizable) continue;
    ExpertSpecs& at = specs[static_cast<size_t>(spec.expert)];
    (spec.kind == MatrixKind::kExpertW1   ? at.w1
     : spec.kind == MatrixKind::kExpertW3 ? at.w3
                                          : at.w2) = static_cast<int>(i);
    any = true;
    size = spec.in * spec.out;
  }
  ExpertsJob experts{job, capture.moe(), tokens_by_expert(capture.moe(), job.n_experts), {}, 0, 0, {}};
  coverage->prefix = job.prefix;
  coverage->tokens = experts.inputs.n_tokens();
  for (int64_t e = 0; e < job.n_experts; ++e) {
    coverage->expert_tokens.push_back(static_cast<int64_t>(experts.routed[static_cast<size_t>(e)].tokens.size()));
    if (coverage->expert_tokens.back() == 0) coverage->without_tokens.push_back(static_cast<int32_t>(e));
  }
  if (!any) return ok_status();
  experts.n0_w13 = job.settings.prior_w13.value_or(static_cast<double>(job.context.config.d_model) / 4);
  experts.n0_w2 = job.settings.prior_w2.value_or(static_cast<double>(job.context.config.d_ff) / 4);
  if (experts.n0_w13 > 0 && capture.ffn_input() != nullptr) experts.prior_w13 = make_prior(*capture.ffn_input());
  if (experts.n0_w2 > 0) {
    experts.sample = sample_tokens(experts.inputs.n_tokens(), job.settings.prior_sample, job.settings.codec.seed,
                                   job.prefix + "prior");
  }
  // Small experts run side by side, one thread each; large ones one after another, each cut over all threads. Same
  // bytes.
  const auto n = static_cast<int64_t>(job.n_experts);
  std::vector<Status> outcome(static_cast<size_t>(n));
  const auto body = [&](int64_t begin, int64_t end) {
    for (int64_t e = begin; e < end; ++e) {
      if (progress.is_cancelled()) return;
      outcome[static_cast<size_t>(e)] = encode_expert(experts, specs[static_cast<size_t>(e)], static_cast<int>(e),
                                                      weights.moe.experts[static_cast<size_t>(e)], records);
      progress.advance(3 * size, job.prefix + "ffn.experts." + std::to_string(e));
    }
  };
  if (size <= kSmallMatrix)
    job.context.pool.parallel_for(n, 1, body);
  else
    body(0, n);
  for (Status& status : outcome) RETURN_IF_ERROR(std::move(status));
  return ok_status();
}

}  // namespace

Status encode_block(const BlockJob& job, const BlockCapture& capture, BlockWeights& weights,
                    std::vector<MatrixRecord>* records, BlockCoverage* coverage, Progress& progress) {
  CHECK(job.specs.size() == job.k2.size()) << "one width per matrix";
  std::vector<MatrixRecord> made(job.specs.size());
  for (size_t i = 0; i < job.specs.size(); ++i) {
    const MatrixSpec& spec = job.specs[i];
    Linear* linear = find_linear(weights, spec);
    if (is_routed(spec) || !spec.is_quantizable || linear == nullptr) continue;
    if (progress.is_cancelled()) return cancelled("stopped before '" + spec.stem + "'");
    const Hessian* hessian = capture.hessian_of(spec);
    if (hessian != nullptr) {
      RETURN_IF_ERROR(check_dropped(*hessian, spec.stem));
      describe_hessian(*hessian, &made[i]);
    }
    RETURN_IF_ERROR(encode_matrix(job.settings, {spec, job.k2[i], linear, &made[i]},
                                  hessian == nullptr ? nullptr : hessian->sum.data(), {}, job.context.pool));
    progress.advance(spec.in * spec.out, spec.stem);
  }
  RETURN_IF_ERROR(encode_experts(job, capture, weights, made, coverage, progress));
  if (progress.is_cancelled()) return cancelled("stopped inside " + job.prefix);
  for (MatrixRecord& record : made) {
    if (!record.stem.empty()) records->push_back(std::move(record));
  }
  return ok_status();
}

}  // namespace espalier
