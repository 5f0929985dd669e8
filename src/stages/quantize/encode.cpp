#include "stages/quantize/encode.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/hash.h"
#include "base/rng.h"
#include "ops/scalar_math.h"
#include "stages/quantize/encode_expert.h"
#include "stages/quantize/output_metrics.h"
#include "stages/quantize/work_folder.h"

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

// The units of a block: one per dense matrix, one per expert, as indices of its specs.
struct BlockUnits {
  std::vector<int> dense;
  std::vector<ExpertSpecs> experts;  // by number; -1 everywhere: not in the job
  int64_t expert_size = 0;           // elements of one of an expert's matrices; 0: no experts
};

BlockUnits units_of(const BlockJob& job) {
  BlockUnits out;
  out.experts.resize(static_cast<size_t>(job.n_experts));
  for (size_t i = 0; i < job.specs.size(); ++i) {
    const MatrixSpec& spec = job.specs[i];
    if (!spec.is_quantizable) continue;
    const auto index = static_cast<int>(i);
    if (!is_routed(spec)) {
      if (spec.kind != MatrixKind::kHead && spec.kind != MatrixKind::kMainProj) out.dense.push_back(index);
      continue;
    }
    ExpertSpecs& at = out.experts[static_cast<size_t>(spec.expert)];
    (spec.kind == MatrixKind::kExpertW1   ? at.w1
     : spec.kind == MatrixKind::kExpertW3 ? at.w3
                                          : at.w2) = index;
    out.expert_size = spec.in * spec.out;
  }
  return out;
}

UnitShape shape_of(const BlockJob& job, std::string name, std::initializer_list<int> indices) {
  UnitShape shape{std::move(name), {}, {}, job.settings.codec.codebook};
  for (const int i : indices) {
    shape.specs.push_back(job.specs[static_cast<size_t>(i)]);
    shape.k2.push_back(job.k2[static_cast<size_t>(i)]);
  }
  return shape;
}

UnitShape dense_shape(const BlockJob& job, int index) {
  return shape_of(job, job.specs[static_cast<size_t>(index)].stem, {index});
}

UnitShape expert_shape(const BlockJob& job, const ExpertSpecs& at, int64_t e) {
  return shape_of(job, job.prefix + "ffn.experts." + std::to_string(e), {at.w1, at.w3, at.w2});
}

// Puts a kept unit where its matrices belong.
void place_unit(EncodedUnit unit, const UnitShape& shape, std::initializer_list<int> indices, BlockWeights& weights,
                std::vector<MatrixRecord>& records) {
  size_t next = 0;
  for (const int i : indices) {
    *find_linear(weights, shape.specs[next]) = Linear::from_exl3(std::move(unit.tensors[next]), WeightResidency::kUnpacked);
    records[static_cast<size_t>(i)] = std::move(unit.records[next]);
    ++next;
  }
}

Status keep_unit(const BlockJob& job, const UnitShape& shape, std::initializer_list<int> indices, BlockWeights& weights,
                 const std::vector<MatrixRecord>& records) {
  if (job.work == nullptr) return ok_status();
  EncodedUnit unit;
  for (const int i : indices) {
    unit.records.push_back(records[static_cast<size_t>(i)]);
    unit.tensors.push_back(copy_exl3(*find_linear(weights, job.specs[static_cast<size_t>(i)])->exl3()));
  }
  return job.work->keep_unit(unit, shape.name);
}

// True when the work folder has the unit; it is placed then.
bool take_kept(const BlockJob& job, const UnitShape& shape, std::initializer_list<int> indices, BlockWeights& weights,
               std::vector<MatrixRecord>& records, Progress& progress) {
  if (job.work == nullptr) return false;
  std::optional<EncodedUnit> unit = job.work->find_unit(shape);
  if (!unit) return false;
  place_unit(std::move(*unit), shape, indices, weights, records);
  for (const MatrixSpec& spec : shape.specs) progress.advance(spec.in * spec.out, spec.stem);
  return true;
}

bool is_whole(const ExpertSpecs& at) { return at.w1 >= 0 && at.w3 >= 0 && at.w2 >= 0; }

Status encode_experts(const BlockJob& job, const BlockCapture& capture, BlockWeights& weights,
                      const BlockUnits& units, std::vector<MatrixRecord>& records, BlockCoverage* coverage,
                      Progress& progress) {
  ExpertsJob experts{job, capture.moe(), tokens_by_expert(capture.moe(), job.n_experts), {}, 0, 0, {}};
  coverage->prefix = job.prefix;
  coverage->tokens = experts.inputs.n_tokens();
  for (int64_t e = 0; e < job.n_experts; ++e) {
    coverage->expert_tokens.push_back(static_cast<int64_t>(experts.routed[static_cast<size_t>(e)].tokens.size()));
    if (coverage->expert_tokens.back() == 0) coverage->without_tokens.push_back(static_cast<int32_t>(e));
  }
  if (job.work != nullptr) {
    const std::string name = job.prefix.substr(0, job.prefix.size() - 1);
    RETURN_IF_ERROR(job.work->keep_coverage(name, *coverage));
  }
  if (units.expert_size == 0) return ok_status();
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
  const auto take_expert = [&](int64_t e) -> Status {
    const ExpertSpecs& at = units.experts[static_cast<size_t>(e)];
    if (!is_whole(at)) return ok_status();
    const UnitShape shape = expert_shape(job, at, e);
    if (take_kept(job, shape, {at.w1, at.w3, at.w2}, weights, records, progress)) return ok_status();
    ExpertWeights& expert = weights.moe.experts[static_cast<size_t>(e)];
    RETURN_IF_ERROR(encode_expert(experts, at, static_cast<int>(e), expert, records));
    progress.advance(3 * units.expert_size, shape.name);
    return keep_unit(job, shape, {at.w1, at.w3, at.w2}, weights, records);
  };
  const auto body = [&](int64_t begin, int64_t end) {
    for (int64_t e = begin; e < end; ++e) {
      if (progress.is_cancelled()) return;
      outcome[static_cast<size_t>(e)] = take_expert(e);
    }
  };
  if (units.expert_size <= kSmallMatrix)
    job.context.pool.parallel_for(n, 1, body);
  else
    body(0, n);
  for (Status& status : outcome) RETURN_IF_ERROR(std::move(status));
  return ok_status();
}

}  // namespace

bool take_kept_block(const BlockJob& job, BlockWeights& weights, std::vector<MatrixRecord>* records, BlockCoverage* coverage,
                     Progress& progress) {
  if (job.work == nullptr) return false;
  const BlockUnits units = units_of(job);
  std::vector<std::pair<UnitShape, std::vector<int>>> shapes;
  for (const int i : units.dense) shapes.push_back({dense_shape(job, i), {i}});
  for (int64_t e = 0; e < job.n_experts; ++e) {
    const ExpertSpecs& at = units.experts[static_cast<size_t>(e)];
    if (is_whole(at)) shapes.push_back({expert_shape(job, at, e), {at.w1, at.w3, at.w2}});
  }
  const std::optional<BlockCoverage> kept = job.work->find_coverage(job.prefix.substr(0, job.prefix.size() - 1));
  if (!kept) return false;
  for (const auto& [shape, indices] : shapes) {
    if (!job.work->has_unit(shape.name)) return false;
  }
  std::vector<EncodedUnit> found;
  for (const auto& [shape, indices] : shapes) {
    std::optional<EncodedUnit> unit = job.work->find_unit(shape);
    if (!unit) return false;
    found.push_back(std::move(*unit));
  }
  std::vector<MatrixRecord> made(job.specs.size());
  for (size_t i = 0; i < shapes.size(); ++i) {
    const auto& [shape, indices] = shapes[i];
    if (indices.size() == 1) {
      place_unit(std::move(found[i]), shape, {indices[0]}, weights, made);
    } else {
      place_unit(std::move(found[i]), shape, {indices[0], indices[1], indices[2]}, weights, made);
    }
    for (const MatrixSpec& spec : shape.specs) progress.advance(spec.in * spec.out, spec.stem);
  }
  for (MatrixRecord& record : made) {
    if (!record.stem.empty()) records->push_back(std::move(record));
  }
  *coverage = *kept;
  return true;
}

Status encode_block(const BlockJob& job, const BlockCapture& capture, BlockWeights& weights,
                    std::vector<MatrixRecord>* records, BlockCoverage* coverage, Progress& progress) {
  CHECK(job.specs.size() == job.k2.size()) << "one width per matrix";
  std::vector<MatrixRecord> made(job.specs.size());
  const BlockUnits units = units_of(job);
  for (const int index : units.dense) {
    const auto i = static_cast<size_t>(index);
    const MatrixSpec& spec = job.specs[i];
    if (progress.is_cancelled()) return cancelled("stopped before '" + spec.stem + "'");
    const UnitShape shape = dense_shape(job, index);
    if (take_kept(job, shape, {index}, weights, made, progress)) continue;
    const Hessian* hessian = capture.hessian_of(spec);
    if (hessian != nullptr) {
      RETURN_IF_ERROR(check_dropped(*hessian, spec.stem));
      describe_hessian(*hessian, &made[i]);
    }
    RETURN_IF_ERROR(encode_matrix(job.settings, {spec, job.k2[i], find_linear(weights, spec), &made[i]},
                                  hessian == nullptr ? nullptr : hessian->sum.data(), {}, job.context.pool));
    progress.advance(spec.in * spec.out, spec.stem);
    RETURN_IF_ERROR(keep_unit(job, shape, {index}, weights, made));
  }
  RETURN_IF_ERROR(encode_experts(job, capture, weights, units, made, coverage, progress));
  if (progress.is_cancelled()) return cancelled("stopped inside " + job.prefix);
  for (MatrixRecord& record : made) {
    if (!record.stem.empty()) records->push_back(std::move(record));
  }
  return ok_status();
}

}  // namespace espalier
