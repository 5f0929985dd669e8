#include "stages/quantize/output_metrics.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "model/project.h"
#include "ops/scalar_math.h"
#include "stages/quantize/hessian.h"

namespace espalier {
namespace {

constexpr double kHeadShare = 8;     // of the head, beside 1 for each kind of reader in each later block
constexpr double kPriorTokens = 32;  // of gate_up_metrics
constexpr int64_t kChunkRows = 1024;

// Adds A^T A of a matrix that reads [D]: A = W with the columns times gain, row r times scale[r] (null: 1).
void add_reader(HessianAccumulator& accumulator, const Linear& w, const std::vector<float>& gain, const float* scale,
                ThreadPool& pool) {
  const int64_t d = w.in(), n = w.out();
  CHECK(static_cast<int64_t>(gain.size()) == d) << "norm of " << gain.size() << " for inputs of " << d;
  std::vector<float> by_column(static_cast<size_t>(d * n));
  w.weight_kn(pool, by_column.data());
  std::vector<float> rows(static_cast<size_t>(std::min(n, kChunkRows) * d));
  for (int64_t first = 0; first < n; first += kChunkRows) {
    const int64_t count = std::min(kChunkRows, n - first);
    for (int64_t i = 0; i < d; ++i) {
      for (int64_t r = 0; r < count; ++r)
        rows[static_cast<size_t>(r * d + i)] =
            by_column[static_cast<size_t>(i * n + first + r)] * gain[static_cast<size_t>(i)];
    }
    accumulator.add(pool, rows.data(), count, scale == nullptr ? nullptr : scale + first);
  }
}

// total += factor * sum / mean diagonal; a matrix of zeros adds nothing.
void add_normalised(const std::vector<double>& sum, int64_t d, double factor, std::vector<double>& total) {
  double trace = 0;
  for (int64_t i = 0; i < d; ++i) trace += sum[static_cast<size_t>(i * d + i)];
  if (!(trace > 0)) return;
  const double scale = factor * static_cast<double>(d) / trace;
  for (size_t i = 0; i < sum.size(); ++i) total[i] += scale * sum[i];
}

std::vector<double> token_frequencies(const std::vector<DatasetRow>& rows, int64_t vocab) {
  std::vector<double> p(static_cast<size_t>(vocab));
  double n = 0;
  for (const DatasetRow& row : rows) {
    for (const int32_t id : row.ids) {
      if (id < 0 || id >= vocab) continue;
      p[static_cast<size_t>(id)] += 1;
      n += 1;
    }
  }
  for (double& v : p) v = n > 0 ? v / n : 0;
  return p;
}

// A^T (diag(p) - p p^T) A of the head.
std::vector<double> head_metric(const GlobalWeights& globals, const std::vector<double>& p, ThreadPool& pool) {
  const int64_t d = globals.head.in(), vocab = globals.head.out();
  std::vector<float> root(static_cast<size_t>(vocab));
  for (size_t v = 0; v < root.size(); ++v) root[v] = static_cast<float>(std::sqrt(p[v]));
  HessianAccumulator accumulator(d);
  add_reader(accumulator, globals.head, globals.norm, root.data(), pool);
  std::vector<double> sum = accumulator.finish(pool).sum;
  std::vector<float> by_column(static_cast<size_t>(d * vocab));
  globals.head.weight_kn(pool, by_column.data());
  std::vector<double> mean(static_cast<size_t>(d));
  pool.parallel_for(d, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      double m = 0;
      for (int64_t v = 0; v < vocab; ++v)
        m += p[static_cast<size_t>(v)] * double{by_column[static_cast<size_t>(i * vocab + v)]};
      mean[static_cast<size_t>(i)] = m * double{globals.norm[static_cast<size_t>(i)]};
    }
  });
  for (int64_t i = 0; i < d; ++i) {
    for (int64_t j = 0; j < d; ++j)
      sum[static_cast<size_t>(i * d + j)] -= mean[static_cast<size_t>(i)] * mean[static_cast<size_t>(j)];
  }
  return sum;
}

void add_readers(const BlockWeights& block, int64_t d, ThreadPool& pool, std::vector<double>& total) {
  const auto add = [&](const std::vector<const Linear*>& matrices, const std::vector<float>& gain) {
    HessianAccumulator accumulator(d);
    for (const Linear* w : matrices) add_reader(accumulator, *w, gain, nullptr, pool);
    add_normalised(accumulator.finish(pool).sum, d, 1, total);
  };
  add({&block.attn.wq_a}, block.attn_norm);
  add({&block.attn.wkv}, block.attn_norm);
  add({&block.moe.gate}, block.ffn_norm);
  const auto n = static_cast<int64_t>(block.moe.experts.size());
  const int64_t count = std::min(n, ResidualMetrics::kReaders);
  std::vector<const Linear*> w1, w3;
  for (int64_t i = 0; i < count; ++i) {
    const ExpertWeights& expert = block.moe.experts[static_cast<size_t>(i * n / count)];
    w1.push_back(&expert.w1);
    w3.push_back(&expert.w3);
  }
  w1.push_back(&block.moe.shared.w1);
  w3.push_back(&block.moe.shared.w3);
  add(w1, block.ffn_norm);
  add(w3, block.ffn_norm);
}

// sum over tokens of (scale * derivative)^2 per output, of z = silu(min(a, limit)) * clamp(u, +-limit).
struct Sums {
  std::vector<double> gate, up;
};

void add_derivatives(const float* a, const float* u, const float* scale, int64_t n_rows, int64_t d_ff, double limit,
                     ThreadPool& pool, Sums& sums) {
  pool.parallel_for(d_ff, 64, [&](int64_t begin, int64_t end) {
    for (int64_t t = 0; t < n_rows; ++t) {
      const double weight = scale == nullptr ? 1.0 : double{scale[t]};
      for (int64_t j = begin; j < end; ++j) {
        const double at = double{a[t * d_ff + j]}, ut = double{u[t * d_ff + j]};
        if (!std::isfinite(at) || !std::isfinite(ut)) continue;  // such rows are counted with the Hessian
        const double x = std::min(at, limit);
        const double sigmoid = 1 / (1 + ops::exp_d(-x));
        const double of_a =
            at < limit ? weight * sigmoid * (1 + x * (1 - sigmoid)) * std::clamp(ut, -limit, limit) : 0.0;
        const double of_u = std::fabs(ut) < limit ? weight * x * sigmoid : 0.0;
        sums.gate[static_cast<size_t>(j)] += of_a * of_a;
        sums.up[static_cast<size_t>(j)] += of_u * of_u;
      }
    }
  });
}

// Mean squares, shrunk towards their mean, to root mean squares; empty when all are zero.
std::vector<double> rooted(std::vector<double> squares, double effective_tokens) {
  double mean = 0;
  for (const double v : squares) mean += v / static_cast<double>(squares.size());
  if (!(mean > 0) || !std::isfinite(mean)) return {};
  const double own = effective_tokens / (effective_tokens + kPriorTokens);
  for (double& v : squares) v = std::sqrt(own * v + (1 - own) * mean);
  return squares;
}

}  // namespace

Result<ResidualMetrics> ResidualMetrics::make(const WeightLoader& loader, const std::vector<DatasetRow>& rows,
                                              Progress& progress, ThreadPool& pool) {
  const Config& config = loader.config();
  const int64_t d = config.d_model;
  progress.begin("output metrics, blocks", config.n_layers + 1);
  std::vector<double> total(static_cast<size_t>(d * d));
  ResidualMetrics out;
  out.layers_.resize(static_cast<size_t>(config.n_layers));
  {
    ASSIGN_OR_RETURN(const GlobalWeights globals, loader.load_globals(pool));
    const std::vector<double> p = token_frequencies(rows, globals.head.out());
    add_normalised(head_metric(globals, p, pool), d, kHeadShare, total);
    progress.advance(1, "head");
  }
  for (int layer = config.n_layers - 1; layer >= 0; --layer) {
    if (progress.is_cancelled()) return cancelled("stopped while computing output metrics");
    add_normalised(total, d, 1, out.layers_[static_cast<size_t>(layer)] = std::vector<double>(total.size()));
    if (layer > 0) {
      ASSIGN_OR_RETURN(const BlockWeights block, loader.load_block(pool, layer));
      add_readers(block, d, pool, total);
    }
    progress.advance(1, block_prefix(config, layer));
  }
  return out;
}

const double* ResidualMetrics::of_layer(int layer) const {
  if (layer < 0 || layer >= static_cast<int>(layers_.size())) return nullptr;
  return layers_[static_cast<size_t>(layer)].data();
}

GateUpMetrics gate_up_metrics(const CallContext& context, const MoeInputs& inputs, const ExpertWeights& expert,
                              const std::vector<int32_t>& tokens, const float* scale) {
  const int64_t d = inputs.d_model, d_ff = expert.w1.out();
  CallContext quiet = context;
  quiet.observer = nullptr;
  Sums sums{std::vector<double>(static_cast<size_t>(d_ff)), std::vector<double>(static_cast<size_t>(d_ff))};
  double weight_sum = 0, weight_squares = 0;
  std::vector<float> x;
  const auto n = static_cast<int64_t>(tokens.size());
  for (int64_t begin = 0; begin < n; begin += kChunkRows) {
    const int64_t rows = std::min(kChunkRows, n - begin);
    x.resize(static_cast<size_t>(rows * d));
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(inputs.x.data() + int64_t{tokens[static_cast<size_t>(begin + r)]} * d, d, x.data() + r * d);
      const double s = scale == nullptr ? 1.0 : double{scale[begin + r]};
      weight_sum += s * s;
      weight_squares += s * s * s * s;
    }
    const std::vector<float> a = project(quiet, expert.w1, "", x.data(), rows, Rounding::kActQuant);
    const std::vector<float> u = project(quiet, expert.w3, "", x.data(), rows, Rounding::kActQuant);
    add_derivatives(a.data(), u.data(), scale == nullptr ? nullptr : scale + begin, rows, d_ff,
                    context.config.swiglu_limit, context.pool, sums);
  }
  GateUpMetrics out;
  if (!(weight_squares > 0)) return out;
  std::vector<float> down(static_cast<size_t>(d_ff * expert.w2.out()));  // [d_ff, D]
  expert.w2.weight_kn(context.pool, down.data());
  for (int64_t j = 0; j < d_ff; ++j) {
    double square = 0;
    for (int64_t i = 0; i < expert.w2.out(); ++i) {
      const double v = double{down[static_cast<size_t>(j * expert.w2.out() + i)]};
      square += v * v;
    }
    sums.gate[static_cast<size_t>(j)] *= square / weight_sum;
    sums.up[static_cast<size_t>(j)] *= square / weight_sum;
  }
  const double effective = weight_sum * weight_sum / weight_squares;
  out.w1 = rooted(std::move(sums.gate), effective);
  out.w3 = rooted(std::move(sums.up), effective);
  return out;
}

}  // namespace espalier
