// The output metrics against plain sums and against differences of the expert's own output.
#include "stages/quantize/output_metrics.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/rng.h"
#include "model/project.h"
#include "unit/stages/tiny_model.h"

namespace espalier {
namespace {

// W with the norm's gain folded in, [out, in].
std::vector<double> reader(const Linear& w, const std::vector<float>& gain, ThreadPool& pool) {
  std::vector<float> kn(static_cast<size_t>(w.in() * w.out()));
  w.weight_kn(pool, kn.data());
  std::vector<double> rows(kn.size());
  for (int64_t r = 0; r < w.out(); ++r) {
    for (int64_t i = 0; i < w.in(); ++i)
      rows[static_cast<size_t>(r * w.in() + i)] =
          double{kn[static_cast<size_t>(i * w.out() + r)]} * double{gain[static_cast<size_t>(i)]};
  }
  return rows;
}

void add_gram(const std::vector<double>& rows, int64_t d, std::vector<double>& sum) {
  for (size_t r = 0; r < rows.size() / static_cast<size_t>(d); ++r) {
    const double* row = rows.data() + r * static_cast<size_t>(d);
    for (int64_t i = 0; i < d; ++i) {
      for (int64_t j = 0; j < d; ++j) sum[static_cast<size_t>(i * d + j)] += row[i] * row[j];
    }
  }
}

void add_scaled(std::vector<double> part, int64_t d, double factor, std::vector<double>& total) {
  double trace = 0;
  for (int64_t i = 0; i < d; ++i) trace += part[static_cast<size_t>(i * d + i)];
  for (size_t i = 0; i < part.size(); ++i) total[i] += factor * part[i] * static_cast<double>(d) / trace;
}

double distance(const std::vector<double>& a, const double* b) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    size += a[i] * a[i];
  }
  return std::sqrt(difference / size);
}

TEST(OutputMetrics, the_residual_metric_is_the_sum_over_later_readers) {
  ThreadPool pool(2);
  SilentProgress progress;
  const WeightLoader& loader = test::tiny_loader();
  const int64_t d = loader.config().d_model;
  const std::vector<DatasetRow> rows = test::random_token_rows({70, 41}, "metrics");
  const ResidualMetrics metrics = ResidualMetrics::make(loader, rows, progress, pool).value();

  const GlobalWeights globals = loader.load_globals(pool).value();
  std::vector<double> p(static_cast<size_t>(globals.head.out()));
  for (const DatasetRow& row : rows) {
    for (const int32_t id : row.ids) p[static_cast<size_t>(id)] += 1.0 / 111;
  }
  const std::vector<double> head = reader(globals.head, globals.norm, pool);
  std::vector<double> part(static_cast<size_t>(d * d)), mean(static_cast<size_t>(d));
  for (size_t v = 0; v < p.size(); ++v) {
    for (int64_t i = 0; i < d; ++i) {
      mean[static_cast<size_t>(i)] += p[v] * head[v * static_cast<size_t>(d) + static_cast<size_t>(i)];
      for (int64_t j = 0; j < d; ++j)
        part[static_cast<size_t>(i * d + j)] += p[v] * head[v * static_cast<size_t>(d) + static_cast<size_t>(i)] *
                                                head[v * static_cast<size_t>(d) + static_cast<size_t>(j)];
    }
  }
  for (int64_t i = 0; i < d; ++i) {
    for (int64_t j = 0; j < d; ++j)
      part[static_cast<size_t>(i * d + j)] -= mean[static_cast<size_t>(i)] * mean[static_cast<size_t>(j)];
  }
  std::vector<double> total(part.size());
  add_scaled(part, d, 8, total);
  for (int layer = loader.config().n_layers - 1; layer >= 0; --layer) {
    std::vector<double> expected(total.size());
    add_scaled(total, d, 1, expected);
    // fp32 chains of 1024 terms: about 1024 * 2^-24.
    EXPECT_LT(distance(expected, metrics.of_layer(layer)), 1e-4) << "layer " << layer;
    const BlockWeights block = loader.load_block(pool, layer).value();
    const auto add = [&](const std::vector<const Linear*>& matrices, const std::vector<float>& gain) {
      std::vector<double> sum(total.size());
      for (const Linear* w : matrices) add_gram(reader(*w, gain, pool), d, sum);
      add_scaled(sum, d, 1, total);
    };
    add({&block.attn.wq_a}, block.attn_norm);
    add({&block.attn.wkv}, block.attn_norm);
    add({&block.moe.gate}, block.ffn_norm);
    std::vector<const Linear*> w1 = {&block.moe.shared.w1}, w3 = {&block.moe.shared.w3};
    ASSERT_LE(static_cast<int64_t>(block.moe.experts.size()), ResidualMetrics::kReaders);
    for (const ExpertWeights& expert : block.moe.experts) {
      w1.push_back(&expert.w1);
      w3.push_back(&expert.w3);
    }
    add(w1, block.ffn_norm);
    add(w3, block.ffn_norm);
  }
  EXPECT_EQ(metrics.of_layer(loader.config().n_layers), nullptr);
  EXPECT_EQ(ResidualMetrics().of_layer(0), nullptr);

  ThreadPool one(1);
  const ResidualMetrics again = ResidualMetrics::make(loader, rows, progress, one).value();
  for (int layer = 0; layer < loader.config().n_layers; ++layer)
    EXPECT_EQ(distance(std::vector<double>(again.of_layer(layer), again.of_layer(layer) + d * d), metrics.of_layer(layer)), 0);
}

TEST(OutputMetrics, gate_and_up_metrics_are_the_change_of_the_experts_output) {
  ThreadPool pool(2);
  const CallContext context = test::tiny_context(pool);
  const BlockWeights block = test::tiny_loader().load_block(pool, 1).value();
  const ExpertWeights& expert = block.moe.experts[0];
  const int64_t d = context.config.d_model, d_ff = expert.w1.out();
  MoeInputs inputs;
  inputs.d_model = d;
  const CounterRng rng(5, "gate up");
  for (int64_t i = 0; i < 40 * d; ++i)
    inputs.x.push_back(static_cast<float>(4 * rng.uniform(static_cast<uint64_t>(i)) - 2));
  std::vector<int32_t> tokens = {3, 4, 9, 11, 25, 39};
  std::vector<float> scale = {0.5f, 1.0f, 0.25f, 2.0f, 0.75f, 1.0f};
  const GateUpMetrics metrics = gate_up_metrics(context, inputs, expert, tokens, scale.data());
  ASSERT_EQ(metrics.w1.size(), static_cast<size_t>(d_ff));

  std::vector<float> down(static_cast<size_t>(d_ff * d));
  expert.w2.weight_kn(pool, down.data());
  const double limit = context.config.swiglu_limit;
  const auto hidden = [&](double a, double u) {
    const double x = std::min(a, limit);
    return x / (1 + std::exp(-x)) * std::clamp(u, -limit, limit);
  };
  std::vector<double> gate(static_cast<size_t>(d_ff)), up(static_cast<size_t>(d_ff));
  double weight_sum = 0, squares = 0;
  for (size_t t = 0; t < tokens.size(); ++t) {
    const float* x = inputs.x.data() + tokens[t] * d;
    const std::vector<float> a = project(context, expert.w1, "", x, 1, Rounding::kActQuant);
    const std::vector<float> u = project(context, expert.w3, "", x, 1, Rounding::kActQuant);
    const double s = double{scale[t]};
    weight_sum += s * s;
    squares += s * s * s * s;
    for (int64_t j = 0; j < d_ff; ++j) {
      constexpr double kStep = 1e-5;
      const double aj = double{a[static_cast<size_t>(j)]}, uj = double{u[static_cast<size_t>(j)]};
      const double by_a = (hidden(aj + kStep, uj) - hidden(aj - kStep, uj)) / (2 * kStep);
      const double by_u = (hidden(aj, uj + kStep) - hidden(aj, uj - kStep)) / (2 * kStep);
      for (int64_t i = 0; i < d; ++i) {
        const double w = double{down[static_cast<size_t>(j * d + i)]};
        gate[static_cast<size_t>(j)] += s * s * by_a * by_a * w * w;
        up[static_cast<size_t>(j)] += s * s * by_u * by_u * w * w;
      }
    }
  }
  const double effective = weight_sum * weight_sum / squares;
  const auto check = [&](const std::vector<double>& sums, const std::vector<double>& found, const char* what) {
    double mean = 0;
    for (const double v : sums) mean += v / weight_sum / static_cast<double>(d_ff);
    for (size_t j = 0; j < sums.size(); ++j) {
      const double expected = std::sqrt((effective * sums[j] / weight_sum + 32 * mean) / (effective + 32));
      EXPECT_NEAR(found[j], expected, 1e-6 * expected) << what << " output " << j;
    }
  };
  check(gate, metrics.w1, "w1");
  check(up, metrics.w3, "w3");

  EXPECT_TRUE(gate_up_metrics(context, inputs, expert, {}, nullptr).w1.empty());
  ThreadPool one(1);
  const GateUpMetrics again = gate_up_metrics(test::tiny_context(one), inputs, expert, tokens, scale.data());
  EXPECT_EQ(again.w1, metrics.w1);
  EXPECT_EQ(again.w3, metrics.w3);
}

}  // namespace
}  // namespace espalier
