#include "bench/exl3_quality/capture.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/file.h"
#include "base/hash.h"
#include "bench/exl3_quality/cache.h"
#include "model/moe.h"
#include "stages/provenance.h"
#include "stages/quantize/encode.h"

namespace espalier::quality {
namespace {

// The defaults of `espalier quantize` when the comparison was written down; fixed here, whatever becomes of them.
constexpr double kRoutingExponent = 2;
constexpr double kPriorStrength = 0.25;  // n0 over the width of the input
constexpr int64_t kPriorSample = 4096;

struct Row {
  SequenceState state;
  StreamState stream;
};

// Inputs of w2 for the given tokens, accumulated; scale null: unweighted.
Hessian hidden_hessian(const CallContext& context, const MoeInputs& inputs, const ExpertWeights& expert,
                       const std::vector<int32_t>& tokens, const float* scale) {
  const int64_t d = inputs.d_model;
  HessianAccumulator accumulator(expert.w2.in());
  std::vector<float> x, z;
  const auto n = static_cast<int64_t>(tokens.size());
  for (int64_t begin = 0; begin < n; begin += HessianAccumulator::kChunkRows) {
    const int64_t rows = std::min(HessianAccumulator::kChunkRows, n - begin);
    x.resize(static_cast<size_t>(rows * d));
    z.resize(static_cast<size_t>(rows * expert.w2.in()));
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(inputs.x.data() + int64_t{tokens[static_cast<size_t>(begin + r)]} * d, d, x.data() + r * d);
    }
    expert_hidden(context, expert, x.data(), rows, nullptr, z.data());
    accumulator.add(context.pool, z.data(), rows, scale == nullptr ? nullptr : scale + begin);
  }
  return accumulator.finish(context.pool);
}

// Per expert: routed Hessian of w1 and w3, of w2, and the all-token one of w2 (empty when not wanted).
struct ExpertHessians {
  std::vector<double> w13, w2, all_w2;
  double effective_w13 = 0, effective_w2 = 0;
  GateUpMetrics outputs;
};

std::vector<ExpertHessians> expert_hessians(const CallContext& context, const BlockCapture& capture,
                                            const MoeWeights& weights, const std::string& prefix, bool all_tokens,
                                            Progress& progress) {
  const MoeInputs& inputs = capture.moe();
  const auto n_experts = static_cast<int64_t>(weights.experts.size());
  const std::vector<ExpertTokens> routed = tokens_by_expert(inputs, n_experts);
  const std::vector<int32_t> sample = sample_tokens(inputs.n_tokens(), kPriorSample, 0, prefix + "prior");
  const std::vector<int32_t> everyone = sample_tokens(inputs.n_tokens(), inputs.n_tokens(), 0, "");
  const HessianPrior prior = make_prior(*capture.ffn_input());
  const double n0_w13 = kPriorStrength * static_cast<double>(context.config.d_model);
  const double n0_w2 = kPriorStrength * static_cast<double>(context.config.d_ff);
  std::vector<ExpertHessians> out(static_cast<size_t>(n_experts));
  context.pool.parallel_for(n_experts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t e = begin; e < end; ++e) {
      if (progress.is_cancelled()) return;
      const ExpertTokens& mine = routed[static_cast<size_t>(e)];
      const ExpertWeights& expert = weights.experts[static_cast<size_t>(e)];
      std::vector<float> scale;
      for (float g : mine.weights) scale.push_back(routing_scale(g, kRoutingExponent));
      out[static_cast<size_t>(e)].outputs = gate_up_metrics(context, inputs, expert, mine.tokens, scale.data());
      HessianAccumulator accumulator(inputs.d_model);
      add_rows(context.pool, inputs, mine.tokens, scale.data(), &accumulator);
      ExpertHessians& h = out[static_cast<size_t>(e)];
      Hessian of_w13 = accumulator.finish(context.pool);
      Hessian of_w2 = hidden_hessian(context, inputs, expert, mine.tokens, scale.data());
      h.effective_w13 = of_w13.effective_rows();
      h.effective_w2 = of_w2.effective_rows();
      h.w13 = blend_with_prior(std::move(of_w13), prior, n0_w13).values;
      const HessianPrior hidden_prior = make_prior(hidden_hessian(context, inputs, expert, sample, nullptr));
      h.w2 = blend_with_prior(std::move(of_w2), hidden_prior, n0_w2).values;
      if (all_tokens) h.all_w2 = make_prior(hidden_hessian(context, inputs, expert, everyone, nullptr)).mean;
      progress.advance(1, prefix + "ffn.experts." + std::to_string(e));
    }
  });
  return out;
}

// Runs the network natively and fills every Hessian of `set`.
Status capture(const WeightLoader& loader, const std::vector<DatasetRow>& calibration, const CaptureOptions& options,
               Progress& progress, ThreadPool& pool, ExpertSet& set) {
  const Config& config = loader.config();
  const CallContext context{config, loader.engram_hashes(), loader.engram_token_map(), Numerics::kKvq, pool, nullptr};
  ASSIGN_OR_RETURN(const GlobalWeights globals, loader.load_globals(pool));
  std::vector<Row> rows;
  for (const DatasetRow& row : calibration) {
    Row r{SequenceState(config), {}};
    RETURN_IF_ERROR(begin_call(context, globals, r.state, row.ids, &r.stream));
    rows.push_back(std::move(r));
  }
  const int64_t n_experts = config.n_experts;
  progress.begin("capture", set.n_layers * (static_cast<int64_t>(rows.size()) + n_experts));
  for (int layer = 0; layer < set.n_layers; ++layer) {
    ASSIGN_OR_RETURN(const BlockWeights weights, loader.load_block(pool, layer));
    std::vector<MatrixSpec> observed = block_matrices(config, layer);
    std::erase_if(observed, [](const MatrixSpec& s) { return s.kind != MatrixKind::kSharedW1; });
    BlockCapture block(observed, false, pool);
    CallContext watched = context;
    watched.observer = &block;
    for (Row& row : rows) {
      if (progress.is_cancelled()) return cancelled("stopped while capturing");
      RETURN_IF_ERROR(run_layer(watched, weights, layer, row.state, row.stream));
      progress.advance(1, block_prefix(config, layer));
    }
    block.finish();
    std::vector<ExpertHessians> hessians =
        expert_hessians(context, block, weights.moe, block_prefix(config, layer), options.all_tokens, progress);
    if (progress.is_cancelled()) return cancelled("stopped while capturing");
    const double* shared = nullptr;
    if (options.all_tokens) {
      set.storage.push_back(make_prior(*block.ffn_input()).mean);
      shared = set.storage.back().data();
    }
    for (ExpertMatrix& m : set.matrices) {
      if (m.spec.block != layer) continue;
      ExpertHessians& h = hessians[static_cast<size_t>(m.spec.expert)];
      const bool is_w2 = m.spec.kind == MatrixKind::kExpertW2;
      if (m.spec.kind == MatrixKind::kExpertW1) m.output_weights = std::move(h.outputs.w1);
      if (m.spec.kind == MatrixKind::kExpertW3) m.output_weights = std::move(h.outputs.w3);
      m.routed = is_w2 ? std::move(h.w2) : h.w13;
      m.effective_tokens = is_w2 ? h.effective_w2 : h.effective_w13;
      m.all_tokens = shared;
      if (is_w2 && options.all_tokens) {
        set.storage.push_back(std::move(h.all_w2));
        m.all_tokens = set.storage.back().data();
      }
    }
  }
  return ok_status();
}

// Weights of all routed experts of the first layers, in the order of ExpertSet.
Status load_weights(const WeightLoader& loader, ThreadPool& pool, ExpertSet& set) {
  for (int layer = 0; layer < set.n_layers; ++layer) {
    for (const MatrixSpec& spec : block_matrices(loader.config(), layer)) {
      if (spec.expert < 0) continue;
      ExpertMatrix m;
      m.spec = spec;
      ASSIGN_OR_RETURN(const Linear linear, loader.load_matrix(spec));
      m.weight.resize(static_cast<size_t>(spec.in * spec.out));
      linear.weight_kn(pool, m.weight.data());
      set.matrices.push_back(std::move(m));
    }
  }
  return ok_status();
}

// One flat array: effective tokens and routed Hessians of all matrices, then, when captured, the all-token ones.
std::vector<double> flatten(const ExpertSet& set, bool all_tokens) {
  std::vector<double> out;
  for (const ExpertMatrix& m : set.matrices) {
    out.push_back(m.effective_tokens);
    out.insert(out.end(), m.routed.begin(), m.routed.end());
  }
  for (const ExpertMatrix& m : set.matrices) {
    if (all_tokens) out.insert(out.end(), m.all_tokens, m.all_tokens + m.spec.in * m.spec.in);
  }
  return out;
}

void unflatten(const std::vector<double>& values, bool all_tokens, ExpertSet& set) {
  const double* at = values.data();
  for (ExpertMatrix& m : set.matrices) {
    m.effective_tokens = *at++;
    m.routed.assign(at, at + m.spec.in * m.spec.in);
    at += m.spec.in * m.spec.in;
  }
  for (ExpertMatrix& m : set.matrices) {
    if (!all_tokens) break;
    set.storage.emplace_back(at, at + m.spec.in * m.spec.in);
    m.all_tokens = set.storage.back().data();
    at += m.spec.in * m.spec.in;
  }
}

}  // namespace

Result<ExpertSet> load_experts(const WeightLoader& loader, const std::vector<DatasetRow>& calibration,
                               const CaptureOptions& options, const std::filesystem::path& cache, Progress& progress,
                               ThreadPool& pool) {
  ExpertSet set;
  const int n_all = loader.config().n_layers;
  set.n_layers = options.n_layers > 0 ? std::min(options.n_layers, n_all) : n_all;
  RETURN_IF_ERROR(load_weights(loader, pool, set));
  set.storage.reserve(2 * set.matrices.size());  // all_tokens points into the vectors; keep them where they are
  ASSIGN_OR_RETURN(const std::string model, model_identity(loader.dir()));
  set.identity = "model " + model + " calibration " + dataset_content_sha256(calibration) + " routed 2 prior 1/4 kvq, with effective tokens";
  size_t count = 0;
  for (const ExpertMatrix& m : set.matrices) count += static_cast<size_t>(m.spec.in * m.spec.in);
  if (options.all_tokens) count *= 2;
  count += set.matrices.size();
  const std::string key =
      set.identity + " layers " + std::to_string(set.n_layers) + (options.all_tokens ? " all tokens" : "");
  const auto path = cache / ("hessians-" + sha256_hex(key).substr(0, 16) + ".bin");
  // The output weights have a file of their own: they came later, and what the other side gets does not depend on them.
  const std::string weights_key = key + " output weights";
  const auto weights_path = cache / ("outputs-" + sha256_hex(weights_key).substr(0, 16) + ".bin");
  size_t n_weights = 0;
  for (const ExpertMatrix& m : set.matrices) n_weights += static_cast<size_t>(m.spec.out);
  std::vector<double> values(count), weights(n_weights);
  ASSIGN_OR_RETURN(set.residual, ResidualMetrics::make(loader, calibration, progress, pool));
  for (ExpertMatrix& m : set.matrices) {
    if (m.spec.kind == MatrixKind::kExpertW2) m.residual = set.residual.of_layer(m.spec.block);
  }
  if (read_cache(path, key, {reinterpret_cast<uint8_t*>(values.data()), count * sizeof(double)}) &&
      read_cache(weights_path, weights_key,
                 {reinterpret_cast<uint8_t*>(weights.data()), n_weights * sizeof(double)})) {
    unflatten(values, options.all_tokens, set);
    const double* at = weights.data();
    for (ExpertMatrix& m : set.matrices) {
      if (m.residual == nullptr && *at > 0) m.output_weights.assign(at, at + m.spec.out);
      at += m.spec.out;
    }
    return set;
  }
  RETURN_IF_ERROR(capture(loader, calibration, options, progress, pool, set));
  values = flatten(set, options.all_tokens);
  RETURN_IF_ERROR(write_cache(path, key, {reinterpret_cast<const uint8_t*>(values.data()), count * sizeof(double)}));
  double* at = weights.data();
  for (const ExpertMatrix& m : set.matrices) {
    std::copy(m.output_weights.begin(), m.output_weights.end(), at);  // none: zeros
    at += m.spec.out;
  }
  RETURN_IF_ERROR(write_cache(weights_path, weights_key,
                              {reinterpret_cast<const uint8_t*>(weights.data()), n_weights * sizeof(double)}));
  return set;
}

}  // namespace espalier::quality
